"""The model that the runs of these tests train, and what they train it on."""

TINY = """\
model:
  variant: {variant}
  depth: {depth}
  hidden_size: 16
  vocab_size: 259
  sa_heads: 2
  sa_kv_heads: 1
  sa_head_size: 8
  da_head_size: 8
  num_experts: 6
  experts_per_token: 2
  expert_size: 8
  router_size: 8
  dtype: float32
data:
  task: boolean
  difficulty: 2
  loss: answer
  sequence_length: 64
  heldout_records: 6
"""
