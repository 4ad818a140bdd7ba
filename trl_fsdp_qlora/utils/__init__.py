"""Small helpers of every room: files, ranks, plain values, values replaced for a moment, failures that end no run."""
