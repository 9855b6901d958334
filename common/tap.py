"""The tap: code that runs inside SGLang's scheduler processes and brings hidden states from the model to the disk.

    decoder layer -> forward hook, here -> region of the ring (common/ring.py) -> writer process (common/tap_writer.py)

`run_scheduler` is what the engine (common/engine.py) starts as its scheduler process. It opens a line to the committing
process (common/tap_link.py), which says when a session begins and ends, and starts the processes that write files
(common/writer_pool.py). Between begin and end the forward hooks copy the rows of the requests of that session. Hidden
states are complete on every rank, so rank r writes the samples with `index % tp == r`. A hook never waits for the
device: copies run on a side stream, and only a full ring makes it wait (for the disk).

Nothing is written unproven: the first batch is compared with SGLang's own EAGLE-3 capture (common/proof.py), and for
every sample the token that follows from its stored last state goes to the committing process (common/capture.py), which
compares it with the engine's answer.
"""

import contextlib
import multiprocessing
import os
import sys
import threading
import time

import torch

from common.errors import UserError
from common.proof import FirstBatchProof, ProofFailed
from common.ring import Ring
from common.state_dtypes import stored_dtypes, to_stored
from common.tap_link import Line, leave_signals_to_the_main_process, writers_a_rank
from common.tap_rows import Piece, consecutive_rows, gather, pieces_of
from common.tap_writer import CANDIDATES, Region, failure
from common.writer_pool import WriterPool

model = None  # the SGLang model of this process
line = None  # the Line to the committing process
writers = None  # the WriterPool of this process
tap = None  # the Tap of the session that is going on
running = None  # the ForwardBatch of the forward pass that is going on
loaded = threading.Event()  # all of the scheduler, here; on another node that may take longer
between_forwards = threading.Lock()  # held by a forward pass, and by whoever changes what the model captures


# ---- what the engine calls -----------------------------------------------------------------------------------------


def run_scheduler(server_args, port_args, gpu_id, tp_rank, *further, **named):
    """The scheduler process: SGLang's own, deaf to Ctrl-C and SIGTERM, and with the tap in it."""
    if server_args.device == "cpu":
        torch._dynamo.config.disable = True  # or routing to experts first waits half a minute for a C++ compiler
    from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process
    from sglang.srt.model_executor.model_runner import ModelRunner

    die_with_parent()
    leave_signals_to_the_main_process()
    initialise = ModelRunner.init_aux_hidden_state_capture

    def remember_model(runner):
        global model
        initialise(runner)
        if not runner.is_draft_worker:
            model = runner.model

    run_forward = ModelRunner.forward

    def forward(runner, forward_batch, *args, **kwargs):
        global running
        with between_forwards:
            running = forward_batch  # layers do not all get it as an argument that a hook sees
            return run_forward(runner, forward_batch, *args, **kwargs)

    run_event_loop = Scheduler.run_event_loop

    def run_loaded(scheduler):
        loaded.set()
        run_event_loop(scheduler)

    Scheduler.run_event_loop = run_loaded
    ModelRunner.init_aux_hidden_state_capture = remember_model
    ModelRunner.forward = forward
    global line, writers
    line = Line(tp_rank, message)
    writers = WriterPool(tp_rank, writers_a_rank(), on_death=writer_died)
    if server_args.device == "cpu":
        use_absorbed_attention()
    return run_scheduler_process(server_args, port_args, gpu_id, tp_rank, *further, **named)


def writer_died(status: int):
    """Nothing can be captured any more: while the model loads, which may take long, end at once."""
    if model is None:
        if status < 0:  # without a last word of its own
            print(f"ChildProcessError: a writer process was killed by signal {-status}", file=sys.stderr, flush=True)
        os._exit(1)
    line.send("lost")


def die_with_parent():
    """End with the process that started this one, also when that ended while this one was still importing."""
    from sglang.srt.utils import kill_itself_when_parent_died

    kill_itself_when_parent_died()
    if os.getppid() != multiprocessing.parent_process().pid:
        os._exit(1)


def message(kind: str, content: dict):
    """What the committing process says."""
    global tap
    if kind in ("begin", "end") and tap is not None:  # a session that broke off was not ended
        with between_forwards:
            ending, tap = tap, None
            ending.proof.stop()
        ending.end()
    if kind == "begin":
        loaded.wait()
        try:
            with between_forwards:
                tap = Tap(model, content, line, writers)
        except Exception as error:
            line.send("failed", **failure(error), session=content["session"])
            return
        tap.send("begun")


def run_detokenizer(server_args, *args, **kwargs):
    """The detokenizer process, deaf like the scheduler."""
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    die_with_parent()
    leave_signals_to_the_main_process()
    return run_detokenizer_process(server_args, *args, **kwargs)


def use_absorbed_attention():
    """Multi-head latent attention on the CPU: the default path of 0.5.14 reads a cache it never wrote and is wrong."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, forward_batch: AttnForwardMethod.MLA)


def layer_hook(config: dict):
    """Hook factory for `layers[i]`, the output of which is the stored tensor number `config["slot"]`."""
    slot = config["slot"]

    def hook(module, args, output):
        if tap is not None and tap.wants(running):
            tap.layer_done(slot, running, output)

    return hook


def logits_hook(config: dict):
    """Hook factory for the logits processor, which runs after all layers."""

    def hook(module, args, output):
        if tap is not None and tap.wants(running):
            tap.forward_done(module, args)

    return hook


# ---- a session -------------------------------------------------------------------------------------------------------


class Tap:
    """Capture of one session on one rank: hooks fill the ring, writer processes empty it.

    settings: session (its requests are called {session}-{index}-{tokens}); ranks; points, names (of the stored
    tensors); hidden_size; dtype (--state-dtype); ring_bytes; and those of tap_writer.Session. `failed` is set by the
    first error, here or in a writer; from then on this rank keeps nothing. It goes on computing with the other ranks
    what all must compute together, or theirs would come from messages that were meant for something else.
    """

    def __init__(self, model, settings: dict, line: Line, writers: WriterPool):
        self.line, self.writers = line, writers
        self.failed = False
        self.check_seconds = 0.0  # that the scheduler's thread spent on both self-checks
        self.settings, self.rank, self.ranks = settings, line.rank, settings["ranks"]
        self.rid_prefix = settings["session"] + "-"
        self.names = settings["names"]
        self.dtypes = stored_dtypes(settings["dtype"], len(self.names) - 1)  # of the stored tensors
        self.device = next(model.parameters()).device
        self.on_gpu = self.device.type == "cuda"
        if self.on_gpu:
            torch.cuda.set_device(self.device)  # of this thread
        self.copy_stream = torch.cuda.Stream(self.device) if self.on_gpu else None
        self.proof = FirstBatchProof(model, settings["points"], self.names, self.ranks, sum_over_ranks)
        self.ring = Ring(settings["ring_bytes"], pin=self.on_gpu)
        self.partial: dict[int, Region] = {}  # samples of which some rows are in the ring
        self.in_flight: list[tuple] = []  # (event, copies): device tensors must outlive the copies that read them
        self.batch: list[Piece] | None = None  # pieces of the forward pass that is running
        self.writers.begin(settings, self.ring, self.stop, self.device)

    # -- hooks, on the scheduler's thread --

    def wants(self, forward_batch) -> bool:
        """Whether a forward pass carries rows to capture: prompts, not decoding steps, verification or idling."""
        return (
            forward_batch.rids is not None
            and forward_batch.forward_mode.is_extend_without_speculative()
            and any(rid.startswith(self.rid_prefix) for rid in forward_batch.rids)
        )

    def layer_done(self, slot: int, forward_batch, output):
        """One captured layer has run: take its residual stream, [T, H], and copy this rank's rows to the ring."""
        with self.failures_reported():
            if slot == 0:
                self.begin_batch(forward_batch)
            elif self.batch is None:
                raise RuntimeError(f"the hook of {self.names[slot]} ran before that of {self.names[0]}")
            hidden, residual = residual_stream(output)
            if self.proof.pending:
                self.proof.seen(slot, hidden, residual)
            if slot == len(self.names) - 1:
                self.last_rows = self.rows_that_end_samples(hidden, residual, self.last_positions)
            if self.failed:
                return
            if slot == 0:
                self.take_regions(forward_batch)
            self.copy_rows(slot, hidden, residual)

    def begin_batch(self, forward_batch):
        """Work out which rows belong to which sample."""
        pieces = pieces_of(forward_batch, self.rid_prefix)
        # Every rank needs the logits of every ending sample, because the head is split over ranks.
        self.ending = [piece for piece in pieces if piece.completes()]
        self.last_positions = [piece.batch_start + piece.rows - 1 for piece in self.ending]
        self.last_rows = None
        self.batch = [piece for piece in pieces if piece.index % self.ranks == self.rank]
        self.copies, self.runs = [], []  # (device tensor, host tensor); rows of this pass, their region and its row

    def take_regions(self, forward_batch):
        """Regions of the ring for the samples that this rank writes, and their token ids in them."""
        whole = [piece for piece in self.batch if piece.rows == piece.tokens]
        if whole:
            region = self.take_region(sum(piece.rows for piece in whole), samples=len(whole))
            row = 0
            for piece in whole:
                piece.region, piece.region_start = region, row
                row += piece.rows
            self.runs.append((consecutive_rows(whole), region, 0))
        for piece in self.batch:
            if piece.rows == piece.tokens:
                continue
            if piece.prefix == 0:
                self.partial[piece.index] = self.take_region(piece.tokens, samples=1)
            if piece.index not in self.partial:
                raise RuntimeError(f"sample {piece.index}: rows from {piece.prefix} on arrived without those before")
            piece.region = self.partial[piece.index]
            self.runs.append(([(piece.batch_start, piece.rows)], piece.region, piece.prefix))
        for rows, region, region_start in self.runs:
            self.copy(gather(forward_batch.input_ids, rows).clone(), region.ids, region_start)

    def take_region(self, rows: int, samples: int) -> Region | None:
        nbytes, carve = Region.plan(self.dtypes, rows, self.settings["hidden_size"])
        of_this_pass = {region.start for _, region, _ in self.runs}  # written only when the pass is over
        incomplete = {region.start for region in self.partial.values()}
        try:
            taken = self.ring.allocate(nbytes, never_freed=incomplete | of_this_pass)
        except ValueError as error:
            raise UserError(f"--ring-gb {self.ring.capacity / 1e9:.3g} is too small: {error}; raise it") from None
        if taken is None:
            raise RuntimeError("the ring was closed while the engine was running")
        start, memory = taken
        self.writers.expect(start, samples)
        return Region(start, *carve(memory), samples)

    def copy_rows(self, slot: int, hidden, residual):
        for rows, region, region_start in self.runs:
            state = gather(hidden, rows)  # [rows, H]
            # A tensor of our own: the next layer works in place on both, while the copy may still be under way.
            state = state.clone() if residual is None else state + gather(residual, rows)
            state, largest = to_stored(state, self.dtypes[slot])
            self.copy(state, region.states[slot], region_start)
            self.copy(largest, region.largest[slot], region_start)

    def copy(self, source: torch.Tensor, target: torch.Tensor, first: int):
        """Have rows copied to host memory: at once on the CPU, by `start_copies` where there is a device."""
        target = target[first : first + len(source)]
        if self.on_gpu:
            self.copies.append((source, target))
        else:
            target.copy_(source)

    def start_copies(self) -> "torch.cuda.Event | None":
        """Start all copies of this forward pass on the side stream; the event of their end, None on the CPU."""
        if not self.on_gpu:
            return None
        event = torch.cuda.Event()
        self.copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copy_stream):
            for source, target in self.copies:
                target.copy_(source, non_blocking=True)
            event.record()
        self.in_flight = [item for item in self.in_flight if not item[0].query()]
        self.in_flight.append((event, self.copies))
        return event

    def rows_that_end_samples(self, hidden, residual, positions: list[int]) -> torch.Tensor | None:
        """The last state of each sample that ends in this batch, [B, H], as it is stored."""
        if not positions:
            return None
        # From page-locked memory, or the copy would wait for all that the device still has to compute.
        where = torch.tensor(positions, pin_memory=self.on_gpu).to(hidden.device, non_blocking=True)
        return hidden[where] if residual is None else hidden[where] + residual[where]

    def forward_done(self, logits_processor, args):
        """All layers have run: prove the first batch, compute own tokens, hand complete samples to the writers."""
        with self.failures_reported(together=True):
            batch, self.batch = self.batch, None
            if batch is None:
                raise RuntimeError("no layer hook ran in this forward pass; the layers' names do not match the model")
            if len(args) < 3:
                raise RuntimeError("the logits processor got its states by keyword; a hook cannot see them")
            began = time.monotonic()
            own = self.checks(logits_processor, *args[1:3], args[4] if len(args) > 4 else None)
            self.check_seconds += time.monotonic() - began
        with self.failures_reported():
            if not self.failed:
                self.hand_over(own)

    def checks(self, logits_processor, post_norm, lm_head, aux) -> torch.Tensor | None:
        """The proof while it is pending, and the own tokens of the samples that end in this pass. All ranks compute
        both together, so each must call this in every pass, also one that has failed."""
        if self.proof.pending:
            if result := self.proof.check(aux, post_norm):
                self.send("proof", rank=self.rank, **result)
        if not self.ending:
            return None
        if self.last_rows is None:  # this rank has failed meanwhile
            self.last_rows = post_norm.new_zeros(len(self.ending), post_norm.shape[-1])
        return own_tokens(logits_processor, lm_head, self.proof.norm(self.last_rows))

    def hand_over(self, own: torch.Tensor | None):
        """The rows of this pass to host memory, and the samples that it completes to the writers."""
        if own is not None:
            host_own = torch.empty(own.shape, dtype=own.dtype, pin_memory=self.on_gpu)
            host_last = torch.empty(self.last_rows.shape, dtype=self.dtypes[-1], pin_memory=self.on_gpu)
            self.copy(own, host_own, 0)
            self.copy(self.last_rows.to(self.dtypes[-1]), host_last, 0)
        event = self.start_copies()
        mine = [number for number, piece in enumerate(self.ending) if piece.index % self.ranks == self.rank]
        if mine:
            pieces = [self.ending[number] for number in mine]
            samples = [(p.index, p.region.start, len(p.region.ids), p.region_start, p.tokens) for p in pieces]
            for piece in pieces:
                self.partial.pop(piece.index, None)
            self.writers.put(event, self.figures(), samples, host_own, host_last, mine)

    # -- the other processes --

    def send(self, kind: str, **content):
        self.line.send(kind, session=self.settings["session"], **content)

    def figures(self) -> dict:
        return {
            "stalls": self.ring.stalls,
            "stalled_seconds": self.ring.stalled_seconds,
            "ring_peak_bytes": self.ring.peak_bytes,
            "check_seconds": self.check_seconds,
        }

    def stop(self, error: Exception | None):
        """Keep no more: this session has failed. The first error is told, unless a writer has told its own (None)."""
        first, self.failed = not self.failed, True
        self.ring.close()
        if first and error is not None:
            self.send("failed", **failure(error))

    def end(self):
        """Have all written that is complete; called when no hook runs any more."""
        self.ring.close()
        self.writers.end(self.settings["session"])
        if self.on_gpu:
            self.copy_stream.synchronize()
        self.ring.free()
        self.send("ended", **self.figures())

    @contextlib.contextmanager
    def failures_reported(self, together: bool = False):
        """An exception in a hook goes to the committing process, instead of killing the engine.

        together: in what all ranks compute together. A failed proof is one on all of them; after anything else the
        others may wait for this one, so its process ends.
        """
        try:
            yield
        except Exception as error:
            self.stop(error)
            if together and self.ranks > 1 and not isinstance(error, ProofFailed):
                raise


# ---- arithmetic ----------------------------------------------------------------------------------------------------


def residual_stream(output):
    """(hidden states, residual or None) of a decoder layer's output; their sum is the residual stream [T, H]."""
    if torch.is_tensor(output):
        return output, None
    hidden, residual = output[0], output[1] if len(output) > 1 else None
    if not torch.is_tensor(hidden) or not (residual is None or torch.is_tensor(residual)):
        kinds = [type(item).__name__ for item in output]
        raise RuntimeError(f"a decoder layer returned {kinds}; expected hidden states and residual")
    return hidden, residual


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over the tensor-parallel ranks; every rank must call it."""
    from sglang.srt.distributed import tensor_model_parallel_all_reduce

    return tensor_model_parallel_all_reduce(tensor.clone())


def own_tokens(logits_processor, lm_head, normed: torch.Tensor) -> torch.Tensor:
    """Best tokens and how far their logits lie below the best one, [B, 2 * CANDIDATES + 1] float64, from normed last
    states [B, H]: tokens, distances, and the distance that rounding alone explains.

    Runs the model's own head on every rank, without writing to the buffer that the engine samples from.
    """
    from sglang.srt.distributed import tensor_model_parallel_all_gather

    logits = logits_processor._compute_lm_head(normed, lm_head)
    if logits_processor.do_tensor_parallel_all_gather:
        logits = tensor_model_parallel_all_gather(logits)
    rounding = max(4 * torch.finfo(normed.dtype).eps, 1e-4)  # relative: a few units in the last place
    logits = logits[:, : logits_processor.config.vocab_size].float()
    values, tokens = logits.topk(CANDIDATES, dim=-1)
    best = values[:, :1]
    return torch.cat([tokens.double(), (best - values).double(), (best.abs() * rounding).double()], dim=-1)
