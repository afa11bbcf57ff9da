"""Starting and supervising runs on Cloud TPUs and GKE; standard library only, so that a laptop needs just gcloud."""
