"""A plain script under ``parwrap.run`` sees no process group; torch, parwrap and installed libraries do."""

import ast

import pytest
import torch
import torch.distributed as dist

import parwrap

ASKING = """
import torch.distributed
from torch.distributed import get_rank, is_initialized

def asked():
    answers = [torch.distributed.is_initialized(), is_initialized()]
    for ask in (get_rank, torch.distributed.get_rank, torch.distributed.get_world_size, torch.distributed.get_backend):
        try:
            answers.append(ask())
        except ValueError:
            answers.append(None)
    return answers
"""
HIDDEN = [False, False, None, None, None, None]


def shown(rank):
    return [True, True, rank, rank, 2, "gloo"]


def test_the_scripts_own_modules_see_no_group_and_installed_ones_do(parwrap_run, script):
    script(ASKING, "helper.py")
    script("", "package/__init__.py")
    script(ASKING, "package/inner.py")
    script(ASKING, "site-packages/library.py")
    path = script(ASKING + "import sys; sys.path.append('site-packages')\nimport helper, package.inner, library\n"
                  "print([asked(), helper.asked(), package.inner.asked(), library.asked()], force=True)")  # fmt: skip
    code, stdout, stderr = parwrap_run("--nproc-per-node", "2", path)

    assert (0, "") == (code, stderr)
    assert sorted(map(str, ([HIDDEN] * 3 + [shown(rank)] for rank in (0, 1)))) == sorted(stdout.splitlines())


def test_an_installed_package_that_is_run_sees_no_group_in_any_of_its_modules(parwrap_run, script, environ):
    environ["PYTHONPATH"] += ":site-packages"
    script("", "site-packages/other.py")
    script("", "site-packages/recipes/__init__.py")
    script(ASKING, "site-packages/recipes/helper.py")
    script("from recipes.helper import asked\nprint(asked())", "site-packages/recipes/train.py")

    assert (0, f"{HIDDEN}\n", "") == parwrap_run("--nproc-per-node", "2", "-m", "recipes.train")


def test_features_of_the_command_see_the_group(parwrap_run, script):
    code, stdout, stderr = parwrap_run("--nproc-per-node", "2", "--sync-bn", "--amp", script(ASKING + "print(asked())"))

    assert (0, f"{HIDDEN}\n") == (code, stdout), stderr


def test_code_that_is_compiled_and_code_in_threads_see_what_the_script_does(parwrap_run, script):
    path = script("""
from concurrent.futures import ThreadPoolExecutor
import torch, torch.distributed as dist
class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2 if dist.is_initialized() else x * 3
def function(x):
    return x * 2 if dist.is_initialized() else x * 3
compiled = [torch.compile(each, backend="eager", fullgraph=True)(torch.ones(1)).item() for each in (Model(), function)]
print(compiled, ThreadPoolExecutor(1).submit(dist.is_initialized).result(), list(map(lambda ask: ask(), [dist.is_initialized])))
""")

    assert (0, "[3.0, 3.0] False [False]\n", "") == parwrap_run("--nproc-per-node", "2", path)


def test_a_function_that_asks_parwrap_for_ranks_sees_the_group(parwrap_run, script):
    path = script(
        ASKING
        + """
import parwrap
print([asked(), parwrap.distributed(asked)(), asked(), parwrap.rank(), parwrap.world_size()])
"""
    )
    code, stdout, stderr = parwrap_run("--nproc-per-node", "2", path)

    assert (0, [HIDDEN, shown(0), HIDDEN, 0, 2]) == (code, ast.literal_eval(stdout)), stderr


def test_a_group_that_the_script_starts_is_its_own(parwrap_run, script):
    path = script("""
import torch.distributed as dist, parwrap
from torch.distributed import get_rank, is_initialized
print(is_initialized())
rank, size = parwrap.rank(), parwrap.world_size()
store = dist.FileStore("store", size)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
print(is_initialized(), dist.is_initialized(), get_rank(), dist.get_world_size())
dist.destroy_process_group()
""")
    code, stdout, stderr = parwrap_run("--nproc-per-node", "2", path)

    assert (0, ["False", "True True 0 2", "True True 1 2"]) == (code, sorted(stdout.splitlines())), stderr


def test_the_error_says_torchs_words_and_what_to_ask_instead(parwrap_run, script):
    code, _, stderr = parwrap_run("--nproc-per-node", "2", script("import torch.distributed as dist\ndist.get_rank()"))

    assert 0 != code
    assert (
        "ValueError: Default process group has not been initialized, please make sure to call init_process_group. parwrap hides its own "
        "from plain scripts: use parwrap.rank() and parwrap.world_size() instead of get_rank()."
    ) in stderr


@pytest.mark.ranks(2)
def test_torchs_sampler_sees_the_group_and_the_decorated_function_too():
    data = torch.utils.data.TensorDataset(torch.arange(8))
    with parwrap.distributed.script_scope():
        sampler, asked = torch.utils.data.DistributedSampler(data), dist.is_initialized()
    with parwrap.distributed():
        asked_inside = dist.is_initialized(), dist.get_rank()

    assert (2, parwrap.rank(), False) == (sampler.num_replicas, sampler.rank, asked)
    assert (True, parwrap.rank()) == asked_inside


@pytest.mark.ranks(2)
def test_a_group_that_is_given_is_no_secret():
    with parwrap.distributed.script_scope():
        assert (parwrap.rank(), 2) == (dist.get_rank(dist.group.WORLD), dist.get_world_size(group=dist.group.WORLD))


@pytest.mark.ranks(2)
def test_a_training_step_asks_for_no_group(monkeypatch):
    from parwrap.session.hidden_launch import HiddenGroup

    asked = []
    monkeypatch.setattr(HiddenGroup, "hides_group", lambda self, frame: asked.append(frame.f_code.co_filename))
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    with parwrap.distributed.script_scope():
        for step in range(4):
            if step == 3:
                asked.clear()
            optimizer.zero_grad()
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
        in_a_step = list(asked)

    assert [] == in_a_step


def test_a_library_that_lies_elsewhere_sees_the_group(parwrap_run, script, environ, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "library.py").write_text(ASKING)
    environ["PYTHONPATH"] += f":{elsewhere}"
    code, stdout, stderr = parwrap_run("--nproc-per-node", "2", script(ASKING + "import library\nprint([asked(), library.asked()])"))

    assert (0, f"{[HIDDEN, shown(0)]}\n") == (code, stdout), stderr
