"""The private names of torch's elastic launcher, driver and compiler that parwrap uses."""

import importlib
import multiprocessing
import os
import signal

import pytest
import torch
from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from parwrap.torch_private import cuda, dynamo, elastic


class OneNode(RendezvousHandler):
    use_agent_store = True

    def __init__(self):
        self.store = HashStore()

    def next_rendezvous(self):
        return RendezvousInfo(self.store, 0, 1, RendezvousStoreInfo("127.0.0.1", 1))

    def get_backend(self):
        return "one node"

    def get_run_id(self):
        return "1"

    def num_nodes_waiting(self):
        return 0

    def is_closed(self):
        return False

    def set_closed(self):
        pass

    def shutdown(self):
        return True


@pytest.fixture(autouse=True)
def _put_handlers_back():
    """torch's agent sets handlers and leaves them."""
    handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = [signal.getsignal(each) for each in handled]
    yield
    for each, handler in zip(handled, before, strict=True):
        signal.signal(each, handler)


@pytest.fixture
def agent(tmp_path):
    spec = WorkerSpec(role="", local_world_size=1, rdzv_handler=OneNode(), entrypoint=fail, max_restarts=1, monitor_interval=0.01)
    return LocalElasticAgent(spec, DefaultLogsSpecs(str(tmp_path)), start_method="fork")


def fail():
    raise SystemExit(3)


def wrapped(owner, name, monkeypatch):
    """The calls of ``owner.name``, each with its keywords and the object."""
    original, calls = getattr(owner, name), []

    def wrapper(self, *args, **kwargs):
        calls.append((self, kwargs))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, wrapper)
    return calls


def test_an_agent_goes_through_these_methods_and_counts_restarts(agent, monkeypatch):
    meetings = wrapped(LocalElasticAgent, elastic.RENDEZVOUS, monkeypatch)
    polls = wrapped(MultiprocessContext, elastic.POLL, monkeypatch)
    closes = wrapped(MultiprocessContext, elastic.CLOSE, monkeypatch)
    assert 1 == elastic.remaining_restarts(agent)
    elastic.set_remaining_restarts(agent, 2)
    result = agent.run()

    assert result.is_failed()
    assert 3 == len(meetings)
    assert 0 == elastic.remaining_restarts(agent)
    assert 3 <= len(polls)
    assert {("death_sig", "timeout")} == {tuple(sorted(keywords)) for _, keywords in closes}
    assert isinstance(elastic.agent_store(agent), HashStore)


def test_an_agent_has_the_store_of_its_rendezvous(agent):
    getattr(agent, elastic.RENDEZVOUS)(agent.get_worker_group())
    elastic.agent_store(agent).set("key", "value")

    assert b"value" == agent.get_worker_group().spec.rdzv_handler.store.get("key")
    assert [0] == [worker.global_rank for worker in agent.get_worker_group().workers]


def test_a_context_has_processes_with_sentinels(tmp_path):
    logs = DefaultLogsSpecs(str(tmp_path))
    context = MultiprocessContext("name", fail, {0: ()}, {0: {"TORCHELASTIC_RESTART_COUNT": "0"}}, "fork", logs)
    assert elastic.process_context(context) is None
    context.start()
    process = elastic.process_context(context).processes[0]
    assert {process.sentinel} == {*elastic.process_context(context).sentinels}
    process.join()
    assert 3 == process.exitcode
    context.close(signal.SIGTERM)


def test_a_dynamic_rendezvous_knows_the_nodes_that_have_arrived():
    parameters = RendezvousParameters("c10d", "localhost:0", "1", 1, 1, is_host=True, local_addr="localhost", store_type="tcp")
    backend, store = create_backend(parameters)
    handler = create_handler(store, backend, parameters)
    assert [] == elastic.arrived_nodes(handler)
    handler.next_rendezvous()

    assert [elastic.this_node(handler)] == elastic.arrived_nodes(handler)
    handler.shutdown()


def test_the_driver_is_asked_for_its_gpus(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 5, raising=torch.version.cuda is not None)  # a build for CPUs has none

    assert 5 == cuda.driver_device_count()


def test_the_compiler_is_a_module():
    assert importlib.import_module(dynamo.DYNAMO).OptimizedModule is type(torch.compile(torch.nn.Identity(), backend="eager"))


def plain(x):
    return x + 1


def test_the_compiler_takes_another_function_in_place_of_a_wrapped_one():
    wrapped = type("Wrapped", (), {"__call__": lambda self, x: x - 1, **dynamo.inlined(plain)})()

    assert 1 == wrapped(2)
    assert plain is getattr(wrapped, dynamo.INLINE)


def test_a_process_that_was_not_forked_is_in_no_bad_fork():
    assert not cuda.is_in_bad_fork()


@pytest.mark.parametrize(("counted", "known"), [(3, 3), (0, 0), (-1, None)])
@pytest.mark.parametrize("hip", [None, "6.4"])
def test_without_the_driver_a_library_counts_or_cannot(counted, known, hip, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "_device_count_amdsmi" if hip else "_device_count_nvml", lambda: counted)

    assert known == cuda.count_without_driver()


@pytest.mark.gpu
def test_the_driver_counts_the_gpus_that_torch_counts():
    assert torch.cuda.device_count() == cuda.driver_device_count()


@pytest.mark.gpu
def test_a_process_that_was_forked_after_cuda_has_started_is():
    torch.cuda.init()
    child = multiprocessing.get_context("fork").Process(target=lambda: os._exit(cuda.is_in_bad_fork()))
    child.start()
    child.join()

    assert 1 == child.exitcode


def test_a_graph_knows_whether_it_is_exported():
    class Module(torch.nn.Module):
        def forward(self, x):
            return x + 1 if getattr(torch.compiler, dynamo.EXPORTING) else x - 1

    assert 0.0 == torch.compile(Module(), backend="eager", fullgraph=True)(torch.ones(1)).item()
    assert 2.0 == torch.export.export(Module(), (torch.ones(1),)).module()(torch.ones(1)).item()


def test_the_signals_to_handle_are_an_option_of_torchrun_or_the_same_without_one():
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(["train.py"])

    assert "SIGTERM,SIGINT,SIGHUP,SIGQUIT" == elastic.given_signals(parsed)


def test_a_function_that_is_left_out_runs_beside_a_graph():
    tracing = []
    beside = dynamo.outside(lambda x: (tracing.append(torch.compiler.is_compiling()), x + 1)[1], "it is counted")
    compiled = torch.compile(lambda x: beside(x * 2) * 3, backend="eager")

    assert 9.0 == compiled(torch.ones(1)).item()
    assert [False] == tracing
    assert {"_torchdynamo_disable": True, "_torchdynamo_disable_msg": "it is counted"}.items() <= vars(beside).items()
    assert vars(beside).items() >= dynamo.left_out("it is counted").items()


def test_a_function_of_torch_is_not_in_graphs_inside_the_block():
    import torch._dynamo

    with dynamo.not_in_graphs(torch._dynamo, [torch.relu]):
        assert torch._dynamo.trace_rules.is_callable_disallowed(torch.relu)
    assert not torch._dynamo.trace_rules.is_callable_disallowed(torch.relu)


def test_frames_of_parwrap_are_left_alone_where_no_graph_calls_them():
    import torch._dynamo

    dynamo.leave_frames(torch._dynamo)
    code = dynamo.inlined.__code__
    assert torch._dynamo.trace_rules.check_verbose(code).skipped
    assert not torch._dynamo.trace_rules.check_verbose(code, is_inlined_call=True).skipped
