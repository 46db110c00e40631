"""What must not be lost: the weights, in and out, and what the files that hold it may say."""
