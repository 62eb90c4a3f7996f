"""One cluster's run from settings to the last checkpoint: where all other packages meet."""
