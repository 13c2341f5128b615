"""zerorun.ops: optimizer updates and the native library that runs them. Never imports the rest of zerorun."""
