"""How buffers get from rank to rank: NCCL, gloo, or memory that ranks of one host read."""
