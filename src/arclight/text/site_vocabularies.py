"""Check the vocabularies of a federation's sites before anything is trained.

`LanguageTask.check_vocabularies` calls it for ``arclight federate``. Sites with tokenizers of their own share the trunk of a model;
whatever is shaped by the vocabulary is personal to each, and their losses are compared after `UnigramLoss` is subtracted. Refused are

* another vocabulary than the server's if sites exchange embeddings, or start from the server's;
* a server vocabulary that no site has;
* a parameter of the vocabulary's shape that is exchanged, such as an output layer beside a personal embedding;
* sites whose losses could not be compared: no ``[task.unigram]``, or a corpus on disk without counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from arclight.fabric.errors import MisconfigurationError
from arclight.text.data.data_settings import BPE, Bytes, Pretrained

if TYPE_CHECKING:
    from arclight.text.training_settings import LanguageSettings


@dataclass(frozen=True)
class Vocabulary:
    """Vocabulary of a tokenizer; ``digest`` is its SHA-256.

    That is empty for one that is still to be learned: from whose text, ``learned_from`` says.
    """

    digest: str = ""
    learned_from: Literal["", "all", "site"] = ""

    def __str__(self) -> str:
        learned = {"all": "learned from all text", "site": "learned from a site's own text"}
        return learned.get(self.learned_from, self.digest[:12])


def vocabulary_of_task(task: LanguageSettings) -> Vocabulary:
    """Return the vocabulary of a task's data.

    Raises FileNotFoundError if its tokenizer is not there.
    """
    from arclight.text.data.data_module import TextDataModule

    data = TextDataModule(task.data)
    if data.learns is None:
        return Vocabulary(data.tokenizer.digest)
    return Vocabulary(learned_from="site" if data.learns.by_site else "all")


def check_site_vocabularies(
    server: LanguageSettings,
    sites: Mapping[str, LanguageSettings],
    personal: Callable[[str], bool],
    *,
    personal_from_client: bool,
    complete: bool,
) -> None:
    """Raise MisconfigurationError for vocabularies of sites that the masks do not allow.

    server: the run's task; its ``data.vocabulary`` is compared with if it is set, else its tokenizer. sites: tasks by client;
    complete: these are all of the run's. personal: whether a client keeps a tensor, by name; personal_from_client: it initialises it, too.
    """
    of_server = _server_vocabulary(server)
    here = {name: vocabulary_of_task(task) for name, task in sites.items()}
    others = {name: found for name, found in here.items() if _differ(found, of_server)}
    if not others:
        return
    if not personal_from_client:
        name, found = next(iter(others.items()))
        raise MisconfigurationError(
            f"site {name} has a vocabulary of its own ({found}), not the server's ({of_server}): one embedding cannot be that of both. "
            f"Set {_masks(server)}, or give all sites one tokenizer (arclight data retokenize)"
        )
    if complete and not isinstance(server.data.tokenizer, BPE) and len(others) == len(here):
        raise MisconfigurationError(
            f"no site shares the server's vocabulary ({of_server}, task.data.tokenizer), so that nobody would ever use its embeddings: take "
            "the tokenizer of a site, or leave task.data.tokenizer out"
        )
    _check_personal(server, personal)
    if server.unigram is None:
        raise MisconfigurationError(
            "the losses of sites with vocabularies of their own cannot be compared: set [task.unigram], which subtracts the unigram "
            "cross-entropy of each site's text"
        )
    for name, task in sites.items():
        _check_counts(name, task)


def _server_vocabulary(server: LanguageSettings) -> Vocabulary | None:
    """Return the vocabulary that the server's model is made for; None if it is not known here."""
    if server.data.vocabulary is not None:
        return Vocabulary(server.data.vocabulary)
    match server.data.tokenizer:
        case Bytes():
            from arclight.text.data.tokenizer import ByteTokenizer

            return Vocabulary(ByteTokenizer().digest)
        case Pretrained(path=path) if path.exists():
            from arclight.text.data.tokenizer import Tokenizer

            return Vocabulary(Tokenizer.load(path).digest)
    try:
        return vocabulary_of_task(server)
    except FileNotFoundError:  # at a node, where the server's data need not be
        return None


def _differ(one: Vocabulary, other: Vocabulary | None) -> bool:
    return one.learned_from == "site" or (other is not None and one != other)


def vocabulary_tensors(task: LanguageSettings) -> list[str]:
    """Name the parameters of a task's model whose shapes depend on the size of the vocabulary."""
    import torch

    from arclight.text.families.zoo import build_model

    shapes = []
    with torch.device("meta"):
        for size in (320, 384):
            model = build_model(task.model, **{**task.overrides, "vocab_size": size})
            shapes.append({f"model.{name}": value.shape for name, value in model.named_parameters()})
    return [name for name, shape in shapes[0].items() if shape != shapes[1][name]]


def _check_personal(server: LanguageSettings, personal: Callable[[str], bool]) -> None:
    names = vocabulary_tensors(server)
    if missing := [name for name in names if not personal(name)]:
        tied = " The output is tied to it: both are one tensor, under this name." if len(names) == 1 else ""
        raise MisconfigurationError(
            f"{missing[0]} has the shape of the vocabulary, which sites have of their own, and masks.personal does not name it.{tied} "
            f"Set {_masks(server)}"
        )


def _masks(server: LanguageSettings) -> str:
    modules = ", ".join(f'"{name.rpartition(".")[0]}."' for name in vocabulary_tensors(server))
    return f'[federation.masks] personal = [{modules}], personal_from = "client"'


def _check_counts(name: str, task: LanguageSettings) -> None:
    """Raise MisconfigurationError for a corpus on disk without unigram counts.

    Others are counted as they are tokenized, or looked up at the site.
    """
    from arclight.data.token_shards import TokenShards
    from arclight.data.unigrams import UNIGRAMS, has_unigrams
    from arclight.text.data.data_module import TextDataModule

    data = TextDataModule(task.data)
    for corpus in data.corpora:
        if isinstance(corpus, Path) and not has_unigrams(TokenShards(corpus / "train")):
            raise MisconfigurationError(
                f"site {name}: {corpus / 'train'} has no {UNIGRAMS}, of which the unigram cross-entropy is computed: "
                f"arclight data pack {corpus} writes it"
            )
