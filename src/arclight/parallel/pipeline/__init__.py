"""Run a model cut into stages on several processes, by a schedule of micro-batches.

An ordinary module needs nothing but the strategy: its own steps are cut, wherever they call which parts.

    al.Trainer(strategy="pipeline")                      # one stage for each device
    al.Trainer(strategy=Pipeline(stages=4, micro_batches=16, memory="22GiB"))

A module can also be written for pipelines. The schedule then runs forward and backward of its micro-batches inside ``batch_loss``:

    class LanguageModel(al.Module):
        runner = None                                    # set by the strategy if the model is cut

        def split_batch(self, batch):                    # what each stage gets
            return (batch["tokens"],), {"positions": ..., "documents": ...}, batch["labels"]

        def loss(self, output, targets):                 # of one micro-batch, by the last stage
            return cross_entropy_sum(output, targets), (targets != IGNORED).sum()

        def batch_weight(self, batch):                   # what the mean over processes and batches is weighted by
            return (batch["labels"] != IGNORED).sum()

        def training_step(self, batch):
            total, count = batch_loss(self, batch)
            self.log("loss", total / count)              # the same value on every process of a pipeline
            return total / count

        def validation_step(self, batch):                # under no_grad the schedule runs forwards only
            total, count = batch_loss(self, batch)
            self.log("val_loss", total / count, batch_size=int(count))

`arclight.parallel.step_protocol` has this protocol with its exact terms. All processes of a pipeline (and of its ``tp`` and ``cp``
groups) must be given the same batch. ``model`` stays one module with the original names, of which each process keeps what
its stages need.

Any other model is cut by `split`, which traces one forward of it; code between its parts runs in every stage:

    pipe = pipeline.split(model, {"input_ids": tokens}, stages=4)
    pipe.stages[1]                                       # a module: its parameters, under their names in the model
    pipe(input_ids=tokens)                               # all stages in this process: what the model returns

It trains without a Trainer on the processes of a group, which all run the same code:

    runner = pipe.on(schedule="1F1B", micro_batches=8, loss=summed_loss)
    optimizer = torch.optim.AdamW(runner.parameters())   # of this process's stages
    result = runner.step(input_ids=tokens, targets=labels)
    runner.clip_grad_norm_(1.0); optimizer.step(); optimizer.zero_grad()
    runner.evaluate(input_ids=tokens, outputs="everywhere").outputs

A model too large for one process is built without memory. Each process reads its stages alone, or draws their first values, which
do not depend on how many stages there are; and all of them save one folder, which opens in any number of stages again:

    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    pipe = pipeline.split(model, {"input_ids": tokens}, stages=4)
    pipe.load("folder/of/safetensors", pipe.local_stage_indices("1F1B"))   # or pipe.initialize(pipe.local_stage_indices("1F1B"), seed=1)
    runner = pipe.on(schedule="1F1B", loss=summed_loss)
    pipe.save("another/folder")                          # as transformers writes one

What a step will do is known before any process is started, and what it does can be seen:

    predicted = pipeline.simulate(model, {"input_ids": tokens}, "ZBVZeroBubble", micro_batches=16, processes=4)
    with pipeline.record(skip=2) as run:                 # on every process; skip: steps that allocate and compile
        trainer.fit(module, data)
    print(run)                                           # busy and idle time of each process, and its causes
    pipeline.timeline(run, predicted)                    # timeline.html: predicted over measured, on one page; or a figure, step.svg
    pipeline.timeline(run, run.simulated)                # over a simulation with the measured times, without noise and transfers
    pipeline.chrome_trace(run)                           # trace.json, for Perfetto

Its folders, each above the next: ``view`` (draw steps), ``steps`` (run a user's own steps in stages), ``weights`` (read and write stages),
``runtime`` (run stages by a schedule), ``splitting`` (cut a model), ``cost`` (measure parts, choose a plan), ``schedule`` (order actions,
simulate orders). ``call_graph`` and ``unit_costs`` are data that they share; ``pipe`` (`split` and `Pipe`) and ``forecast`` (`simulate`)
join them for users. Open ``pipe.py`` first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.parallel.pipeline.forecast import simulate as simulate
    from arclight.parallel.pipeline.pipe import Pipe as Pipe
    from arclight.parallel.pipeline.pipe import StageModule as StageModule
    from arclight.parallel.pipeline.pipe import split as split
    from arclight.parallel.pipeline.runtime.batch_splitting import Reducer as Reducer
    from arclight.parallel.pipeline.runtime.pipe_runner import PipeRunner as PipeRunner
    from arclight.parallel.pipeline.runtime.recording import record as record
    from arclight.parallel.pipeline.view.chrome import chrome_trace as chrome_trace
    from arclight.parallel.pipeline.view.timeline import timeline as timeline
    from arclight.parallel.pipeline_strategy import Pipeline as Pipeline

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Pipe": "arclight.parallel.pipeline.pipe",
        "PipeRunner": "arclight.parallel.pipeline.runtime.pipe_runner",
        "Reducer": "arclight.parallel.pipeline.runtime.batch_splitting",
        "Pipeline": "arclight.parallel.pipeline_strategy",
        "StageModule": "arclight.parallel.pipeline.pipe",
        "chrome_trace": "arclight.parallel.pipeline.view.chrome",
        "record": "arclight.parallel.pipeline.runtime.recording",
        "simulate": "arclight.parallel.pipeline.forecast",
        "split": "arclight.parallel.pipeline.pipe",
        "timeline": "arclight.parallel.pipeline.view.timeline",
    },
)
