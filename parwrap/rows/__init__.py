"""A batch is one tensor whose rows lie on the ranks (contract, rules of ``batch="whole"``)."""
