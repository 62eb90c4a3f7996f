"""One cluster: a DeepSpeed pipeline on fast links. All that touches DeepSpeed lives here."""
