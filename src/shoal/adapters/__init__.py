"""One env in, one stepping protocol out. Nothing here knows about parallelism."""
