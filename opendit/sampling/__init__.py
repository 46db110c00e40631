"""From a checkpoint to pictures and clips."""
