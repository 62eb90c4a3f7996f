"""What a run leaves for people: metrics files, wandb, a progress display, a report."""
