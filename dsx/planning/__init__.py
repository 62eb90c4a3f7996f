"""What a run will take, before a GPU is rented: memory, layout, time, bytes, loss."""
