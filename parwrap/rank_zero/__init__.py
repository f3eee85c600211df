"""Rank 0 speaks and writes; the other ranks are silent, and write to scratch (contract, rule 8)."""
