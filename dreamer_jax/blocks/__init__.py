"""What models are made of: attentions, experts, routers, norms, positions, embedding and head. Each counts itself."""
