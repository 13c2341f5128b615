"""Where masters, optimizer states and parameters lie when not on the device: host memory, or a file."""
