"""The pytest plugin: ``@pytest.mark.ranks(n)`` runs a test on n ranks. Start with ``plugin.py``.

::

    plugin.py             the plugin: collects, starts and reports
    rank_pools.py         the processes of the ranks: started, kept for the next test, watched and ended
    rank_process.py       the code in a rank's own process
    process_state.py      what a test must leave as it was
    rank_fixtures.py      pytest's own fixtures on ranks
    preloaded.py          what the fork server does once for all tests
"""
