"""The smallest official routes from trainers of others to zerorun. Each module needs the library after which it is named."""
