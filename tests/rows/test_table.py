import pytest, torch, time
import parwrap
from parwrap.rows.tensors import as_rows, collected, current, Rows, Partial
from parwrap.rows.layout import equal_parts, Layout


@pytest.mark.ranks(2)
@pytest.mark.parametrize("i", range(40))
def test_a(i):
    t = time.time()
    with parwrap.distributed(batch="whole"):
        t1 = time.time()
        b = current().between
        lay = equal_parts(5, b.rank, b.size)
        w = torch.randn(5, 3)
        x = as_rows(lay.own(w).clone(), lay)
        for _ in range(200):
            assert torch.equal(collected(x + 1), w + 1)
        t2 = time.time()
    if i > 37:
        print(b.rank, t1 - t, t2 - t1, time.time() - t2)
    assert i < 38
