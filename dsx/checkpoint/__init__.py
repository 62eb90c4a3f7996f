"""What a run needs to go on as if nothing had happened: written, found, read, exported."""
