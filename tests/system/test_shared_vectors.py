"""Vectors that ranks of one node write to shared memory."""

import threading

import pytest
import torch

from parwrap.system.shared_vectors import SharedVectors


def boards(ranks):
    memory = bytearray(SharedVectors.size(ranks))
    return [SharedVectors(memory, ranks, rank) for rank in range(ranks)]


def vector(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_all_ranks_read_what_each_has_put():
    ranks = boards(3)
    for rank, board in enumerate(ranks):
        board.put(1, vector(rank, 10 * rank))

    assert [[[0, 0], [1, 10], [2, 20]]] * 3 == [board.all(1, 2, lambda: None).tolist() for board in ranks]


def test_a_vector_stays_while_a_faster_rank_is_at_the_next_turn():
    ours, theirs = boards(2)
    ours.put(1, vector(1))
    theirs.put(1, vector(2))
    ours.all(1, 1, lambda: None)
    ours.put(2, vector(3))

    assert [[1], [2]] == theirs.all(1, 1, lambda: None).tolist()


def test_who_waits_may_give_up():
    ours, _ = boards(2)
    ours.put(1, vector(1))

    def give_up():
        raise TimeoutError("enough")

    with pytest.raises(TimeoutError, match="enough"):
        ours.all(1, 1, give_up)


def test_many_turns_at_different_speeds():
    ours, theirs = boards(2)
    read = {}

    def turns(board, mine):
        read[mine] = []
        for turn in range(1, 500):
            board.put(turn, vector(mine * turn, turn))
            read[mine].append(board.all(turn, 2, lambda: None).tolist())

    threads = [threading.Thread(target=turns, args=arguments) for arguments in [(ours, 1), (theirs, 2)]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [[[turn, turn], [2 * turn, turn]] for turn in range(1, 500)] == read[1] == read[2]
