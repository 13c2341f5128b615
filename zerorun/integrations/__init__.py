"""The smallest official routes from other people's trainers. Each module needs the library after which it is named."""
