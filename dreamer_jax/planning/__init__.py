"""Planning: what a train step needs on a TPU slice and how fast it could be, known before any TPU is rented."""
