"""The pytest plugin: ``@pytest.mark.ranks(n)`` runs a test on n ranks. Start with ``plugin.py``."""
