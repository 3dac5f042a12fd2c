"""What would stop a run, found before it waits in a queue; needs no torch and no GPU."""
