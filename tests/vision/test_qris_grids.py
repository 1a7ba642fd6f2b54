"""Module grids: refined to where codes are, and their codewords corrected by how sure each module is, but never by chance."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

cv2 = pytest.importorskip("cv2")
segno = pytest.importorskip("segno")
pytest.importorskip("zxingcpp")

from arclight.vision.qris.reading import decode  # noqa: E402
from arclight.vision.qris.reading.decode import LaidGrid, decode_modules, decoded_text  # noqa: E402
from arclight.vision.qris.reading.error_correction import SoftSymbol, blocks, checks_of, layout, masks  # noqa: E402
from arclight.vision.qris.reading.finder_patterns import FinderPattern, pairs, triples  # noqa: E402
from arclight.vision.qris.reading.grid import Grid, fixed_modules, template_correlation  # noqa: E402
from arclight.vision.qris.reading.grid_search import _Search  # noqa: E402
from arclight.vision.qris.reading.known_bits import guess_known_bits  # noqa: E402
from arclight.vision.qris.reading.refinement import (  # noqa: E402
    Slopes,
    Stiffness,
    climb,
    correlations,
    right_versions,
)

SQUARE = np.array([[40, 40], [160, 40], [160, 160], [40, 160]], np.float32)


def modules(text: str, version: int, level: str = "M", mask: int = 3) -> np.ndarray:
    made = segno.make(text, version=version, error=level, mask=mask, micro=False, boost_error=False)
    return np.array(made.matrix) > 0


def soft(dark: np.ndarray, noise: float = 0.0, seed: int = 0) -> np.ndarray:
    """Soft decisions of the certainty that equalizers give under noise of this deviation."""
    seen = np.where(dark, 1.0, -1.0) + np.random.default_rng(seed).normal(0, noise, dark.shape)
    return (seen * 0.2 / noise**2 if noise else seen).astype(np.float32)


def shape_of(quad: np.ndarray) -> np.ndarray:
    return np.concatenate([quad, np.zeros((4, 2))]).astype(np.float32)


def drawn(dark: np.ndarray, quad: np.ndarray, blur: float = 1.5) -> np.ndarray:
    """A picture (200, 200) of modules with their quiet zone, their corners at ``quad``."""
    cells = np.kron(np.pad(np.where(dark, 20, 230).astype(np.uint8), 4, constant_values=230), np.ones((8, 8), np.uint8))
    low, high = 32.0, len(cells) - 32.0
    own = np.array([[low, low], [high, low], [high, high], [low, high]], np.float32)
    matrix = cv2.getPerspectiveTransform(own, quad.astype(np.float32))
    picture = cv2.warpPerspective(cells, matrix, (200, 200), flags=cv2.INTER_AREA, borderMode=cv2.BORDER_REPLICATE)
    return cv2.GaussianBlur(picture.astype(np.float32), (0, 0), blur)


@pytest.mark.parametrize("version", range(1, 17))
@pytest.mark.parametrize("level", "LMQH")
def test_tables_of_correction_are_those_of_the_standard(version: int, level: str) -> None:
    dark = modules("HELLO", version, level, mask=version % 8)
    symbol = SoftSymbol.of(soft(dark), version)
    rows, columns = layout(version).bits.T
    correction, members = blocks(version, level)
    assert np.sort(np.concatenate(members)).tolist() == list(range(layout(version).codewords))
    np.testing.assert_array_equal(symbol.corrected()[0], dark)  # every parity check of every block holds
    rng = np.random.default_rng(version)
    for block in members:  # and tells of wrong bits
        assert checks_of(len(block), correction).shape == (8 * correction, 8 * len(block))
        bits = 8 * rng.choice(block, 3, replace=False) + rng.integers(8, size=3)
        symbol.soft[rows[bits], columns[bits]] *= -0.05
    np.testing.assert_array_equal(symbol.corrected()[0], dark)


@pytest.mark.parametrize("version, level", [(1, "M"), (2, "M"), (4, "Q"), (7, "Q")])
@pytest.mark.parametrize("mirrored", [False, True])
def test_doubtful_modules_are_corrected_beyond_what_counting_errors_can(
    version: int, level: str, mirrored: bool
) -> None:
    dark = modules("A 1", version, level)
    dark = dark.T if mirrored else dark
    more = 0
    for seed in range(6):
        seen = soft(dark, 0.57, seed)
        symbol = SoftSymbol.of(seen, version)
        corrected, _ = symbol.corrected()
        if corrected is not None:
            assert decoded_text(decode_modules(corrected, version)) == "A 1"
            more += decode_modules(symbol.dark, version) is None
    assert more >= 3


def test_noise_is_not_corrected_into_a_code() -> None:
    draw = np.random.default_rng(0)
    for version in (1, 1, 1, 2, 3):
        for certainty in (0.05, 0.2, 1.0):
            noise = draw.normal(0, certainty, (17 + 4 * version,) * 2).astype(np.float32)
            assert SoftSymbol.of(noise, version).corrected()[0] is None


LAID_OUT = [
    ("http://q-r.to/bakE4e", 2, "L"),
    ("5a0SEB06", 1, "L"),
    ("XIMVJ2O", 1, "M"),
    ("055550663583934905", 1, "L"),
    ("0555506635839349", 1, "M"),
    ("https://www.example.com/menu", 3, "M"),
    ("00020101021126610014ID.CO.QRIS.WWW01189360091100000000010215ID10200000000015904Toko6304ABCD", 8, "Q"),
    ("A" * 300, 12, "M"),
]


def data_bits(dark: np.ndarray, version: int, level: str) -> np.ndarray:
    """The data bits of clean modules, in the order of the data."""
    symbol = SoftSymbol.of(soft(dark), version)
    rows, columns = layout(version).bits.T
    bits = (symbol.soft[rows, columns] > 0) ^ masks(version)[symbol.number & 7]
    correction, members = blocks(version, level)
    return bits.reshape(-1, 8)[np.concatenate([block[:-correction] for block in members])].reshape(-1).astype(int)


@pytest.mark.parametrize("text, version, level", LAID_OUT)
def test_known_bits_are_those_of_the_codes_of_another_encoder(text: str, version: int, level: str) -> None:
    bits = data_bits(modules(text, version, level), version, level)
    guess = guess_known_bits(np.where(bits > 0, 0.95, 0.05), version)
    assert guess is not None
    known = guess.values >= 0
    np.testing.assert_array_equal(guess.values[known], bits[known])
    assert guess.gain == pytest.approx(known.sum() * np.log2(1.9))
    assert not known.all()


def test_known_bits_of_noise_are_not_guessed() -> None:
    draw = np.random.default_rng(0)
    for version in (1, 3, 9, 12):
        for _ in range(10):
            assert guess_known_bits(draw.uniform(0.02, 0.98, 8 * (19 + 50 * version)), version) is None


@pytest.mark.parametrize("text", ["gr\u00fc\u00dfe an \u4e50\u54c1 \u00e4\u00f6\u00fc", "\u00fc\u00fc\u00fcabc"])
def test_texts_of_other_characters_than_ascii_are_corrected_by_their_padding(text: str) -> None:
    dark = modules(text, 6, "L")
    read = 0
    for seed in range(10):
        symbol = SoftSymbol.of(soft(dark, 0.7, seed), 6)
        corrected, excess = symbol.corrected()
        assert excess > 0, "without the layout there are too many wrong modules"
        assert corrected is None or decoded_text(decode_modules(corrected, 6)) == text
        read += corrected is not None
    assert read >= 8


def test_symbols_of_another_layout_are_never_corrected_into_another_text() -> None:
    dark = np.array(segno.make_sequence("wxyz" * 10, version=2, error="L", mask=3)[0].matrix) > 0  # structured append
    text, bits = decoded_text(decode_modules(dark, 2)), data_bits(dark, 2, "L")
    assert guess_known_bits(np.where(bits > 0, 0.95, 0.05), 2) is None
    for seed in range(20):
        symbol = SoftSymbol.of(soft(dark, 0.55 + 0.02 * (seed % 10), seed), 2)
        corrected, _ = symbol.corrected()
        assert corrected is None or decoded_text(decode_modules(corrected, 2)) == text


@pytest.mark.parametrize("text, version, level", LAID_OUT[:4])
@pytest.mark.parametrize("only_dark", [False, True])
def test_retouched_modules_are_corrected_by_the_layout_of_the_data(
    text: str, version: int, level: str, only_dark: bool
) -> None:
    dark = modules(text, version, level)
    rows, columns = layout(version).bits.T
    correction, members = blocks(version, level)
    bits = np.flatnonzero(dark[rows, columns] | (not only_dark))
    right = 0
    for seed in range(6):
        spoilt = np.random.default_rng(seed).permutation(bits)[: round(0.9 * correction * len(members))]
        seen = soft(dark, 0.45, seed)
        seen[rows[spoilt], columns[spoilt]] *= -1
        symbol = SoftSymbol.of(seen, version)
        assert decode_modules(symbol.dark, version) is None
        corrected, _ = symbol.corrected()
        if corrected is not None:
            assert decoded_text(decode_modules(corrected, version)) == text
            right += 1
    assert right >= 2


def test_doubt_grows_with_noise() -> None:
    dark = modules("A 1", 2)
    doubts = [SoftSymbol.of(soft(dark, noise), 2).doubt() for noise in (0.3, 0.5, 0.7, 0.9)]
    assert doubts == sorted(doubts)
    assert doubts[0] < 0.1
    assert doubts[-1] > 0.7


def test_version_information_is_set_as_the_standard_has_it() -> None:
    dark = modules("A 1", 8)
    spoilt = dark.copy()
    spoilt[:6, -11:-8] = spoilt[-11:-8, :6] = False
    np.testing.assert_array_equal(decode.with_fixed_modules(spoilt, 8), dark)


def test_a_part_of_a_code_that_passes_for_a_smaller_one_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).uniform(0, 255, (200, 200)).astype(np.float32)
    laid = LaidGrid(noise, Grid(1, shape_of(SQUARE), 0.9))
    found = SimpleNamespace(extra={"Version": "M1"}, valid=True, content_type=None, text="209")
    monkeypatch.setattr(decode, "_zxing", lambda image, **options: [] if options else [found])
    assert decode._read_patiently(laid) is None
    found.extra["Version"] = "1"
    assert decode._read_patiently(laid).text == "209"


@pytest.mark.parametrize("version", [1, 2, 5])
def test_grids_climb_to_where_a_code_is(version: int) -> None:
    leaning = SQUARE + np.array([[3, 5], [-6, 1], [4, -3], [-2, 2]], np.float32)
    slopes = Slopes(drawn(modules("A 1", version), leaning))
    module = 120 / (17 + 4 * version)
    draw = np.random.default_rng(0)
    near = [Grid(version, shape_of(leaning + draw.normal(0, 0.25 * module, (4, 2))), 0.0) for _ in range(5)]
    for found in climb(slopes, near, rounds=12):
        assert found.score > 0.9
        assert np.abs(found.corners[[0, 1, 3]] - leaning[[0, 1, 3]]).max() < 0.25 * module
        assert found.score == pytest.approx(
            template_correlation(slopes.picture, found.shape[None], version)[0], abs=1e-3
        )
    assert climb(slopes, [], rounds=3) == []


def test_the_best_of_many_proposals_are_found_by_a_share_of_the_modules() -> None:
    quad = SQUARE + np.array([[3, 5], [-6, 1], [4, -3], [-2, 2]], np.float32)
    picture = cv2.GaussianBlur(drawn(modules("A 1", 3), quad), (0, 0), 2)
    draw = np.random.default_rng(0)
    shapes = np.stack([shape_of(quad + draw.normal(0, 8, (4, 2))) for _ in range(800)])
    search = _Search(Slopes(picture), 120.0, 5)
    all_of_them = template_correlation(search.soft.picture, shapes, 3)
    found = search.rough([(3, shapes)])
    assert found[0].score == pytest.approx(all_of_them.max(), abs=1e-5)
    assert len(found) == 3


def test_grids_do_not_climb_onto_plain_paper_or_over_the_horizon() -> None:
    draw = np.random.default_rng(0)
    noise = Slopes(np.where(np.arange(200) < 100, draw.uniform(0, 255, (200, 200)), 128).astype(np.float32))
    near = [Grid(2, shape_of(SQUARE + draw.normal(0, 12, (4, 2))), 0.0) for _ in range(40)]
    for found in climb(noise, near, rounds=12):
        assert -1 <= found.score <= 0.7
        assert np.abs(found.shape).max() < 2000


def test_a_grid_climbs_alone_as_among_others() -> None:
    slopes = Slopes(drawn(modules("A 1", 3), SQUARE))
    near = [Grid(version, shape_of(SQUARE + shift), 0.0) for version, shift in ((3, 1.0), (2, 2.0), (5, -2.0))]
    together = climb(slopes, near, rounds=6)
    for one, grid in zip(together, near, strict=True):
        (alone,) = climb(slopes, [grid], rounds=6)
        assert alone.score == pytest.approx(one.score, abs=1e-3)


def test_stiff_grids_stay_parallelograms_and_bows_follow_bent_sheets() -> None:
    leaning = SQUARE + np.array([[0, 0], [0, 0], [-14, -14], [0, 0]], np.float32)
    slopes = Slopes(drawn(modules("A 1", 1), leaning))
    near = [Grid(1, shape_of(leaning), 0.0)]
    (free,), (stiff,) = (climb(slopes, near, rounds=12, stiffness=s) for s in (Stiffness(), Stiffness(lean=1000)))
    assert np.abs(free.corners - leaning).max() < 4
    a, b, c, d = stiff.corners
    assert np.abs(a + c - b - d).max() < 3
    assert free.score > stiff.score
    flat = drawn(modules("A 1", 4), SQUARE)
    x, y = np.meshgrid(np.arange(200, dtype=np.float32), np.arange(200, dtype=np.float32))
    bent = Slopes(
        cv2.remap(flat, x, y + 8 * (1 - ((x - 100) / 60) ** 2), cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
    )
    start = [Grid(4, shape_of(SQUARE), 0.0)]
    (straight,), (bowed,) = (climb(bent, start, rounds=12, stiffness=s) for s in (Stiffness(), Stiffness(bow=3)))
    assert bowed.score > straight.score + 0.05
    assert not straight.shape[4:].any()
    assert bowed.shape[4, 1] < -2, "its upper edge bows upwards"


def test_correlations_of_many_versions_are_those_of_each_and_the_right_one_is_taken() -> None:
    picture = drawn(modules("A 1", 4), SQUARE)
    shapes = np.stack([shape_of(SQUARE + shift) for shift in (0, 1, 2)])
    shapes[2, 4:] = 1.5
    found = correlations(picture, shapes, np.array([4, 1, 7]))
    apart = [
        template_correlation(picture, shape[None], version)[0] for shape, version in zip(shapes, (4, 1, 7), strict=True)
    ]
    np.testing.assert_allclose(found, apart, atol=1e-4)
    named = right_versions(picture, [Grid(version, shapes[0], 0.0) for version in (2, 3, 6, 7)], 16)
    assert [grid.version for grid in named[:3]] == [4, 4, 4]
    assert right_versions(picture, [Grid(2, shapes[0], 0.0)], 3)[0].version <= 3


def test_finder_patterns_propose_codes_of_their_distance() -> None:
    version, module = 4, 120 / 33
    corners = SQUARE.astype(np.float64)
    inside = 3.5 * module
    centres = [corners[0] + inside, corners[1] + [-inside, inside], corners[3] + [inside, -inside]]
    patterns = [FinderPattern(centre, module, 0.9) for centre in centres]
    for frames in (triples(patterns), pairs(patterns[:2]), pairs(patterns[1:])):
        versions, quads = frames.proposals(16)
        assert np.abs(quads[versions == version] - corners).max((1, 2)).min() < 1e-6
    assert len(triples(patterns[:2]).proposals(16)[0]) == 0
    assert fixed_modules(version).shape == (35, 35)
