"""zerorun.ops: optimizer updates and, later, native kernels. Never imports the rest of zerorun."""
