"""Small helpers of every room: files, ranks, plain values, what may fail without ending a run."""
