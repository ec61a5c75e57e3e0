"""The command line `shoal` and what it is made of; the only part of the library that prints."""
