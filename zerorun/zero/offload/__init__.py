"""Places for masters, optimizer states and parameters that are not on the device: host memory, or a file."""
