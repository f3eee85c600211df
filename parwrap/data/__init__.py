"""What each rank reads: shares of loaders in training passes, everything in all others (contract, rules 2 and 3)."""
