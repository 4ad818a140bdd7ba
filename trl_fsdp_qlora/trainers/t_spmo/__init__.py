"""T-SPMO: credit for single token transitions, from a prefix trie over the completions of a group."""
