"""What the report says of each figure."""

TITLES = {
    "depth_attention": "Where depth attention looks (the paper's Fig. 4)",
    "depth_given_expert": "At which depths each expert works (Fig. 5)",
    "lorenz": "How many experts do how much of the work (Fig. 6)",
    "expert_given_depth": "Which experts each depth uses (Fig. 7)",
    "attention_experts": "Which attention expert each depth chooses",
    "lens": "From which depth the prediction can be read off",
    "residual": "How the residual stream changes",
    "entropy": "How certain the prediction is",
    "settling": "How many steps a token needs to settle",
    "changes": "How far each step moves single tokens",
    "trajectories": "Where single tokens go",
    "hops": "How far the news of the source has come",
    "routers": "How decided the routers are",
    "observed": "What else the model's blocks saw",
}

TEXTS = {
    "depth_attention": (
        "Average attention scores of a token at one depth (vertical) over its own earlier depths and the current one "
        "(horizontal), over all heads. Each row is divided by its largest score, so 1 is the depth looked at most. A "
        "uniform skip connection would be a triangle of one colour; a model that only looks at one depth, one column. "
        "Depths without depth attention (model.da_every) have an empty row."
    ),
    "depth_given_expert": (
        "Each column is one expert of the expert attention, and shows how its selections spread over the depths. "
        "Experts stand in the order of how many depths hold 90 % of their selections (upper axis), and within such a "
        "group in the order of one depth drawn from their distribution. Specialised experts are on the left, those "
        "that serve many depths on the right."
    ),
    "lorenz": (
        "Experts are taken in the order of how often they were selected, the busiest first; the curve shows which "
        "portion of all experts (log scale) takes which portion of the routings. Where a curve ends on the right is "
        "how many experts were used at all. Equal use is a straight line through 0, which bends only because the axis "
        "is logarithmic. A layer of LA can use its own experts only, 1/L of them all."
    ),
    "expert_given_depth": (
        "The same selections, but each row sums to 1: which experts a depth relies on. The experts stand in the "
        "order of Fig. 5."
    ),
    "attention_experts": (
        "The projections around each attention are a top-1 mixture of as many experts as there are depths. A diagonal "
        "would be classical layers, found again by training; spread rows are depths whose tokens choose differently. "
        "Dimensions that tokens choose are attention over the sequence, depths, learned slots and experts, in this "
        "order, as far as the model has them. Depths without that attention have an empty row."
    ),
    "lens": (
        "The output head applied to the residual stream after every depth (the logit lens): how often its most likely "
        "token is the true next one, given the true tokens before; of a classifier, how often its answer is right. A "
        "curve that rises early and stays flat means that the later depths add little."
    ),
    "residual": (
        "Averages over the tokens after each depth: length of the residual stream, cosine with the stream before the "
        "depth, and distance from it relative to its length. A distance that falls towards 0 means convergence. In "
        "recurrent models the stream is normalised at every depth, which fixes its length up to the learned scale."
    ),
    "entropy": (
        "Entropy of the distribution that the logit lens predicts after every depth, averaged over the same targets. "
        "0 is certainty. Where it stays flat, further steps don't change how sure the model is."
    ),
    "settling": (
        "A step changes the state s of a token to s'. Left: how large these changes are at each depth, as a share of "
        "the state, over all tokens; the dashed line is the threshold. Right: how many steps a token takes until all "
        "changes that follow are below the threshold. Tokens that still move in the last step are the bar on the right."
    ),
    "changes": (
        "The same change, for some tokens of the first documents, each a row in reading order. The model goes deeper "
        "here than it was trained, where it can; the dashed line is the trained depth. Rows that stay bright are "
        "tokens that don't come to rest."
    ),
    "trajectories": (
        "The states of these tokens, projected on the first two principal components of all of them together, one row "
        "of panels a document. Colour is the step, the ring the first state, which in some models is random, the cross "
        "the last one. Over each panel stands what the second half of the path looks like in all dimensions: it stays "
        "in one place (fixed point), moves on in one direction (slider), comes back to where it has been (orbit), or "
        "none of these. This describes the steps that were taken and proves nothing about those that would follow."
    ),
    "hops": (
        "Every graph is computed twice, with its source marked and unmarked. The colour is the share of the nodes at a "
        "distance from the source (horizontal) whose states differ by at least 3 % after a step (vertical). The mask "
        "lets nothing pass the diagonal; the line is how far at least half of the nodes at every distance are reached. "
        "A model that searches moves it by one edge a step."
    ),
    "routers": (
        "Left: entropy of each router's sigmoid scores over all its experts, as a share of the largest possible; "
        "near 1 all scores are alike. Beside it: scores of the selected experts, of the expert attention where there "
        "is one, else of the router that is named."
    ),
    "observed": "Averages over the tokens at each depth of the quantities that this family of models records.",
}

BIASES = (
    " Right: balancing biases of each router; thin from least to greatest, thick the middle half, a dot for the median."
)
"""Of the figure of routers, where they have biases."""
