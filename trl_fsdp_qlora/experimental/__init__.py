"""Parts that may change or go: a folder each, whose README has its owner and the rule by which it leaves."""
