"""What lets a user see that the contract holds for a script: ``verify`` compares with one process, ``scaling`` measures time."""
