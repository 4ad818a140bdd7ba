"""Log-probabilities of the tokens that count: which tokens, with which weight, through which LM head."""
