"""Tensors sent in each round, compared with lists by hand for a small model."""

import contextlib
import json
import math
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arclight.federated.coordination.settings import Streaming
from arclight.federated.errors import FederatedError, ProtocolError, SettingsError
from arclight.federated.masks.settings import Experts, HeadExperts, Masks, half_life, period_of
from arclight.federated.masks.transfer_mask import ServerMasks, TransferMask, expected_entry, expert_count
from arclight.federated.protocol import Entry, Manifest
from arclight.federated.settings import Federation
from arclight.recipe import read

NAMES = (
    "embed.weight", "blocks.0.attn.weight", "blocks.0.norm.weight", "blocks.1.attn.weight", "blocks.1.norm.weight",
    "blocks.2.attn.weight", "blocks.10.attn.weight", "head.weight",
)  # fmt: skip
MODEL = [f"model/{name}" for name in NAMES]
MOMENTS = ("exp_avg", "exp_avg_sq")
ALL = [*MODEL, *(f"{state}/{name}" for state in MOMENTS for name in NAMES)]


def transfer_mask(moments: tuple[str, ...] = (), streaming: Streaming | None = None, **masks) -> TransferMask:
    return TransferMask(masks=Masks(**masks), moments=moments, streaming=streaming, names=NAMES)


def test_without_masks_all_weights_go_both_ways_and_no_moment_does() -> None:
    plain = transfer_mask()
    assert plain.up(ALL, 1) == MODEL
    assert plain.down(MODEL, 2, 1) == MODEL


def test_left_out_frozen_and_own_weights() -> None:
    some = transfer_mask(
        send=("blocks.", "embed.*", "head.weight"),
        leave_out=("*.norm.weight",),
        frozen=("embed.",),
        personal=("head.weight",),
        randomised=("blocks.2.",),
    )
    assert some.up(MODEL, 1) == [f"model/blocks.{n}.attn.weight" for n in (0, 1, 10)]
    assert some.down(MODEL, 1, None) == MODEL
    assert set(MODEL) - set(some.down(MODEL, 2, 1)) == {"model/head.weight", "model/blocks.2.attn.weight"}


def test_client_initialised_tensors_are_never_sent_down() -> None:
    own = transfer_mask(MOMENTS, personal=("embed.", "head."), personal_from="client")
    begins = [key for key in ALL if not key.endswith(("embed.weight", "head.weight"))]
    assert own.down(ALL, 1, None) == begins
    assert own.up(ALL, 1) == begins
    assert transfer_mask(personal=("embed.",)).down(MODEL, 1, None) == MODEL
    with pytest.raises(ValueError, match="name them in personal"):
        Masks(personal_from="client")
    with pytest.raises(ValueError, match="no whole model to evaluate"):
        Federation(masks=Masks(personal=("embed.",), personal_from="client"))


def test_periods_of_states_and_layers() -> None:
    des_loc = transfer_mask(MOMENTS, periods={"exp_avg/embed.*": 1, "exp_avg": 3, "exp_avg_sq": 6, "head.": 2})
    for number in range(1, 13):
        sent = set(des_loc.up(ALL, number))
        assert "model/embed.weight" in sent
        assert "exp_avg/embed.weight" in sent
        assert ("exp_avg/blocks.0.attn.weight" in sent) == (number in (1, 3, 6, 9, 12))
        assert ("exp_avg_sq/embed.weight" in sent) == (number in (1, 6, 12))
        assert ("model/head.weight" in sent) == (number % 2 == 0)
        assert ("exp_avg/head.weight" in sent) == (number in (1, 3, 6, 9, 12))  # states count before names
    assert des_loc.cycle == 6


def test_the_order_of_periods_does_not_count() -> None:
    """Messages sort their keys."""
    said = {"head.": 2, "exp_avg/embed.*": 1, "exp_avg": 3, "*": 5, "head.weight": 4}
    for periods in (said, dict(sorted(said.items())), dict(reversed(said.items()))):
        some = transfer_mask(MOMENTS, periods=periods)
        keys = (
            "model/head.weight",
            "exp_avg/embed.weight",
            "exp_avg/head.weight",
            "model/embed.weight",
            "exp_avg_sq/head.weight",
        )
        assert [some.period(key) for key in keys] == [4, 1, 3, 5, 4]


periods = st.dictionaries(
    st.sampled_from(["exp_avg", "exp_avg_sq", "embed.", "*.norm.weight", "head.weight"]), st.integers(1, 6)
)


@settings(max_examples=60, deadline=None)
@given(
    periods, st.sampled_from([None, Streaming(fragments=1), Streaming(fragments=2), Streaming(fragments=3, overlap=2)])
)
def test_all_travels_within_a_cycle_and_the_next_is_the_same(
    given: dict[str, int], streaming: Streaming | None
) -> None:
    some = transfer_mask(MOMENTS, streaming, periods=given)
    shared = max((math.gcd(every, streaming.fragments) for every in given.values()), default=1) if streaming else 1
    if shared > 1:  # the rounds of a fragment may never be those of a period
        with contextlib.suppress(FederatedError):
            some.check()
        return
    some.check()
    rounds = [some.up(ALL, number) for number in range(1, 4 * some.cycle + 1)]
    assert {key for sent in rounds[: some.cycle] for key in sent} == set(ALL)
    assert {key for sent in rounds[some.cycle : 2 * some.cycle] for key in sent} == set(ALL)
    assert rounds[2 * some.cycle : 3 * some.cycle] == rounds[3 * some.cycle :]
    fragments = 1 if streaming is None else streaming.fragments
    assert {key for sent in rounds[:fragments] for key in sent} >= {key for key in ALL if not key.startswith("model/")}


@settings(max_examples=60, deadline=None)
@given(
    periods,
    st.sampled_from([None, Streaming(fragments=2, overlap=0), Streaming(fragments=3, overlap=2)]),
    st.sets(st.integers(1, 20), min_size=1),
)
def test_a_client_takes_up_just_what_has_changed_since_it_last_began(
    given: dict[str, int], streaming: Streaming | None, trains: set[int]
) -> None:
    """Played through: what the server folds in each round, and which version of each tensor a client must hold."""
    some, lag = transfer_mask(MOMENTS, streaming, periods=given), streaming.overlap if streaming else 0
    version = {0: dict.fromkeys(ALL, 0)}
    for number in range(1, 21):
        version[number] = {**version[number - 1], **dict.fromkeys(some.up(ALL, number), number)}
    held: dict[str, int] = {}
    since = None
    for number in sorted(trains):
        base = version[max(number - 1 - lag, 0)]
        for key in (taken := some.down(ALL, number, since)):
            assert since is None or held[key] != base[key]
            held[key] = base[key]
        assert held == base, taken
        since = number


def test_fragments_are_dealt_by_block_whatever_the_order_of_names() -> None:
    here = transfer_mask(streaming=Streaming(fragments=2))
    there = TransferMask(streaming=Streaming(fragments=2), names=tuple(reversed(NAMES)))
    for number in range(1, 5):
        sent = here.up(MODEL, number)
        assert set(sent) == set(there.up(MODEL, number))
        blocks = {key.removeprefix("model/").rsplit(".", 2)[0] for key in sent if "blocks" in key}
        assert blocks in ({"blocks.0", "blocks.2"}, {"blocks.1", "blocks.10"})
    assert set(here.up(MODEL, 1)) | set(here.up(MODEL, 2)) == set(MODEL)


@pytest.mark.parametrize(
    ("masks", "says"),
    [
        ({"frozen": ("embd.weight",)}, "embed.weight"),
        ({"send": ("block.0.",)}, r"blocks\.0\."),
        ({"personal": ("*.nrm.weight",)}, "norm"),
        ({"periods": {"exp_av": 3}}, "exp_avg"),
        ({"periods": {"exp_avg/blocks.7.*": 3}}, "exp_avg/blocks"),
        ({"experts": Experts()}, "masks.experts.tensors"),
        ({"leave_out": ("*",)}, "nothing would ever be sent"),
    ],
)
def test_patterns_that_match_nothing_name_the_nearest(masks, says: str) -> None:
    with pytest.raises(FederatedError, match=says):
        transfer_mask(MOMENTS, **masks).check()


def test_a_period_that_never_meets_its_fragments_turn_is_refused() -> None:
    with pytest.raises(FederatedError, match="would never travel"):
        transfer_mask(streaming=Streaming(fragments=2), periods={"blocks.": 2}).check()


def test_more_fragments_than_blocks_are_refused() -> None:
    with pytest.raises(FederatedError, match=r"streaming\.fragments"):
        transfer_mask(streaming=Streaming(fragments=30, overlap=0)).check()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"periods": {"a": 0}}, r"periods: need table of int >= 1, got \{'a': 0\}"),
        ({"randomise_every": 0}, "randomise_every: need int >= 1, got 0"),
        ({"send": ()}, r"with send = \[\] nothing would ever be learned"),
        ({"frozen": ("a",), "personal": ("a",)}, "a cannot be both frozen and personal"),
    ],
)
def test_settings_that_cannot_be(wrong, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Masks(**wrong)


def test_tables_and_recipes_bring_masks_back() -> None:
    table = {
        "masks": {"personal": ["head."], "periods": {"exp_avg": 3}, "experts": {"per_client": 2}},
        "moments": ["exp_avg"],
    }
    federation = read(Federation, table)
    assert federation.masks == Masks(personal=("head.",), periods={"exp_avg": 3}, experts=Experts(per_client=2))
    whole = TransferMask.of(federation, NAMES, experts=(1, 3))
    assert TransferMask.from_table(json.loads(json.dumps(whole.to_table())), NAMES) == whole
    for bad, message in (
        ({"mask": {}}, "there are no masks 'mask' here"),
        ({"moments": 3}, "masks that cannot be: .*\nmoments\n"),
        ({"masks": {"randomise_every": 0}}, r"masks that cannot be: .*\nmasks\.randomise_every\n"),
    ):
        with pytest.raises(ProtocolError, match=message):
            TransferMask.from_table(bad, NAMES)


@pytest.mark.parametrize(("beta", "steps"), [(0.5, 1.0), (0.9, 6.58), (0.99, 68.97), (0.999, 692.8)])
def test_half_lives(beta: float, steps: float) -> None:
    assert half_life(beta) == pytest.approx(steps, rel=1e-3)
    assert period_of(beta, 10) == max(1, int(steps // 10))


def test_the_guides_settings_are_settings() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "federated.md").read_text(encoding="utf-8")
    tables = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", guide, re.DOTALL)]
    federations = [read(Federation, table["federation"]) for table in tables if "federation" in table]
    assert any(one.masks.experts is not None and one.masks.periods for one in federations)


def test_stacks_are_the_tensors_named_by_the_settings() -> None:
    assert not transfer_mask().is_stack("model/embed.weight")
    some = transfer_mask(experts=Experts(tensors=("blocks.*.attn.weight",)))
    assert some.is_stack("model/blocks.0.attn.weight")
    assert not some.is_stack("model/embed.weight")


def weights(**shapes: tuple[int, ...]) -> Manifest:
    tensors = {
        f"model/{name.replace('__', '.')}": Entry(blob="0" * 64, dtype="F32", shape=shape)
        for name, shape in shapes.items()
    }
    return Manifest(kind="weights", tensors=tensors, blobs={"0" * 64: 0})


STACKED = weights(blocks__0__experts__w=(4, 2, 3), blocks__1__experts__w=(4, 5), head__weight=(2,), scale=())


def mixture(**experts) -> TransferMask:
    names = [key.removeprefix("model/") for key in STACKED.tensors]
    return TransferMask(masks=Masks(experts=Experts(**experts)), moments=MOMENTS, names=tuple(names))


def test_a_server_gives_each_client_its_experts() -> None:
    masks = Masks(experts=Experts(per_client=2))
    server = ServerMasks(Federation(clients=2, masks=masks), 0, {"a": 0, "b": 1}.get)
    assert server.of("a", 1, STACKED).experts == (0, 1)
    assert server.of("b", 1, STACKED).experts == (2, 3)
    with pytest.raises(FederatedError, match="'c' is not a client of this run"):
        server.of("c", 1, STACKED)
    plain = ServerMasks(Federation(clients=2), 0, {"a": 0}.get)
    assert plain.of("a", 1, STACKED) is plain.of("nobody", 1, STACKED) is plain.whole(STACKED)


PAIRS = weights(l__0__wv__experts=(6, 2, 3), l__0__wo__experts=(6, 3, 2), l__0__feed__experts__w1=(4, 5), norm=(2,))


def test_a_server_gives_each_client_the_same_experts_of_every_head() -> None:
    masks = Masks(experts=Experts(per_client=2), head_experts=HeadExperts(heads=2, per_client=2, overlap=1))
    server = ServerMasks(Federation(clients=2, masks=masks, moments=("exp_avg",)), 0, {"a": 0, "b": 1}.get)
    first, second = server.of("a", 1, PAIRS), server.of("b", 1, PAIRS)
    assert (first.experts, second.experts) == ((0, 1), (2, 3))
    assert (first.head_experts, second.head_experts) == ((0, 1, 3, 4), (1, 2, 4, 5))  # of three experts each
    sent = first.up(["model/l.0.wv.experts", "exp_avg/l.0.wo.experts", "model/l.0.feed.experts.w1", "model/norm"], 1)
    assert sent == [
        *(f"model/l.0.wv.experts[{n}]" for n in (0, 1, 3, 4)),
        *(f"exp_avg/l.0.wo.experts[{n}]" for n in (0, 1, 3, 4)),
        "model/l.0.feed.experts.w1[0]", "model/l.0.feed.experts.w1[1]", "model/norm",
    ]  # fmt: skip
    assert TransferMask.from_table(first.to_table(), first.names) == first


@pytest.mark.parametrize(
    ("masks", "said"),
    [
        (Masks(head_experts=HeadExperts(heads=4)), "masks.head_experts.heads = 4 does not divide the 6 pairs of"),
        (Masks(head_experts=HeadExperts(heads=2, per_client=4)), "masks.head_experts.per_client is 4, each head has 3 experts"),
        (Masks(experts=Experts(per_client=5)), "masks.experts.per_client is 5, the model has 4 experts"),
        (Masks(head_experts=HeadExperts(tensors=("*.wq.experts",))), "masks.head_experts.tensors has .*wq.experts', which matches no"),
        (
            Masks(experts=Experts(tensors=("*experts*",)), head_experts=HeadExperts()),
            "l.0.wv.experts is named by masks.experts.tensors and by masks.head_experts.tensors",
        ),
    ],
)  # fmt: skip
def test_head_experts_that_do_not_fit_are_refused(masks: Masks, said: str) -> None:
    server = ServerMasks(Federation(clients=1, masks=masks), 0, {"a": 0}.get)
    with pytest.raises(SettingsError, match=said):
        server.whole(PAIRS)  # before there are rounds and clients


def test_experts_that_no_client_has_are_counted() -> None:
    masks = Masks(experts=Experts(per_client=1), head_experts=HeadExperts(heads=2, per_client=1))
    server = ServerMasks(Federation(clients=2, masks=masks), 0, {"a": 0, "b": 1}.get)
    assert server.unassigned(PAIRS, 2) == {"experts": ((2, 3), 4), "head_experts": ((2,), 3)}
    assert server.unassigned(PAIRS, 3) == {"experts": ((3,), 4)}
    assert server.unassigned(PAIRS, 4) == {}
    overlapping = Masks(experts=Experts(per_client=2, overlap=1))
    assert ServerMasks(Federation(masks=overlapping), 0, {}.get).unassigned(PAIRS, 2) == {"experts": ((3,), 4)}
    random = Masks(experts=Experts(assign="random"))
    assert ServerMasks(Federation(masks=random), 0, {}.get).unassigned(PAIRS, 2) == {}


def test_a_servers_masks_follow_the_names_of_the_weights() -> None:
    server = ServerMasks(Federation(clients=2), 0, {}.get)
    first = server.whole(STACKED)
    assert server.whole(STACKED) is first
    other = weights(another=(2,))
    assert server.whole(other).names == ("another",)
    wrong = ServerMasks(Federation(clients=2, masks=Masks(send=("nothing.",))), 0, {}.get)
    with pytest.raises(FederatedError, match="nothing"):
        wrong.whole(STACKED)


def test_stacks_of_unlike_sizes_have_no_count() -> None:
    assert expert_count("experts", Experts(), STACKED) == 4
    for unlike in ((3, 5), (0, 5), ()):
        with pytest.raises(FederatedError, match="must hold as many experts each"):
            expert_count("experts", Experts(), weights(blocks__0__experts__w=(4, 2), blocks__1__experts__w=unlike))
    for empty in ((0, 5), ()):
        with pytest.raises(FederatedError, match="w has 0"):
            expert_count("experts", Experts(), weights(blocks__0__experts__w=empty))


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("model/head.weight", (2,)),
        ("model/blocks.0.experts.w[0]", (2, 3)),
        ("model/blocks.1.experts.w[3]", (5,)),
        ("exp_avg/blocks.0.experts.w[3]", (2, 3)),
        ("exp_avg/head.weight", (2,)),
        ("model/blocks.0.experts.w[4]", None),
        ("model/blocks.0.experts.w[1]", None),
        ("model/blocks.0.experts.w", None),
        ("model/head.weight[0]", None),
        ("model/unknown", None),
        ("momentum/head.weight", None),
    ],
)
def test_a_client_sends_what_is_expected_of_it_alone(key: str, shape: tuple[int, ...] | None) -> None:
    found = expected_entry(key, replace(mixture(), experts=(0, 3, 4)), 1, STACKED)
    assert (None if found is None else found.shape) == shape


def test_an_expert_of_a_stack_without_dimensions_is_not_expected() -> None:
    transfer_mask = TransferMask(masks=Masks(experts=Experts(tensors=("scale",))), names=("scale",), experts=(0,))
    assert expected_entry("model/scale[0]", transfer_mask, 1, weights(scale=())) is None
