"""Objects followed through drawn scenes, scored by our own metric, and counted."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from benchmarks.moving_boxes import NAMES, Scene, found_in, score
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from arclight.vision import Detections
from arclight.vision.inputs.image_source import Frame
from arclight.vision.results.writers import Prediction
from arclight.vision.tracking.assignment import assign
from arclight.vision.tracking.byte_track import height_scaled
from arclight.vision.tracking.counting import LineCount, ZoneCount
from arclight.vision.tracking.mot_metrics import score_tracks
from arclight.vision.tracking.oc_sort import area_and_ratio
from arclight.vision.tracking.tracks import TRACKERS, Trackers, make_tracker


def boxes_of(boxes, conf=0.9, labels=0) -> Detections:
    count = len(boxes)
    return Detections.from_arrays(boxes, np.broadcast_to(conf, count), np.broadcast_to(labels, count), names=NAMES)


# -- assignment ----------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 8).flatmap(
        lambda n: st.integers(1, 8).flatmap(
            lambda m: st.lists(st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.5, np.inf]), min_size=m, max_size=m), min_size=n, max_size=n)
        )
    ),
    st.sampled_from([0.3, 0.8, 5.0]),
)  # fmt: skip
def test_assignment_is_as_cheap_as_that_of_scipy(rows: list[list[float]], limit: float) -> None:
    cost = np.array(rows)
    pairs = assign(cost, limit)
    assert len({column for _, column in pairs}) == len({row for row, _ in pairs}) == len(pairs)
    total = sum(cost[row, column] for row, column in pairs) + limit * (len(cost) - len(pairs))
    extended = np.concatenate((np.where(cost > limit, 1e6, cost), np.full((len(cost),) * 2, limit)), axis=1)
    best = extended[linear_sum_assignment(extended)].sum()
    assert total == pytest.approx(best)
    assert assign(cost, limit) == pairs


def test_assignment_of_nothing_and_of_nan() -> None:
    assert assign(np.zeros((0, 3)), 1.0) == assign(np.zeros((3, 0)), 1.0) == []
    assert assign([[2.0]], 1.0) == []
    with pytest.raises(ValueError, match="got NaN"):
        assign([[float("nan")]], 1.0)


# -- the filter ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("motion", [height_scaled(), area_and_ratio()])
def test_the_filter_learns_a_steady_motion_and_predicts_it(motion) -> None:
    box = np.array([100.0, 50, 140, 130])
    state = motion.start(box)
    np.testing.assert_allclose(motion.box(state.x), box)
    for number in range(1, 40):
        state = motion.update(motion.predict(state), box + 3.0 * number)
        assert np.linalg.eigvalsh(state.P).min() > 0
    for number in range(40, 45):
        state = motion.predict(state)
        np.testing.assert_allclose(motion.box(state.x), box + 3.0 * number, atol=1.0)


def test_one_update_is_the_textbook_one() -> None:
    """x' = x + P / (P + R) (z - x), P' = P R / (P + R), where all is diagonal."""
    motion = area_and_ratio()
    state = motion.start(np.array([0.0, 0, 10, 10]))
    updated = motion.update(state, np.array([2.0, 2, 12, 12]))
    assert updated.x[0] == pytest.approx(5 + 10 / 11 * 2)
    assert updated.P[0, 0] == pytest.approx(10 * 1 / 11)
    assert updated.P[2, 2] == pytest.approx(10 * 10 / 20)
    assert updated.P[4, 4] == pytest.approx(1e4)


# -- the metric ----------------------------------------------------------------------------------------------------

A, B, FAR = [0, 0, 10, 10], [100, 0, 110, 10], [300, 300, 310, 310]


def frames_of(*rows):
    """Each row: {true number: box}, {found number: box}."""
    return [
        (
            (list(truth), np.array(list(truth.values()), float).reshape(-1, 4)),
            (list(found), np.array(list(found.values()), float).reshape(-1, 4)),
        )
        for truth, found in rows
    ]


def test_scores_of_a_perfect_tracker_whatever_its_numbers() -> None:
    scores = score_tracks(frames_of(*[({1: A, 2: B}, {7: B, 9: A})] * 4))
    assert (scores.mota, scores.idf1, scores.switches) == (1.0, 1.0, 0)


def test_a_number_that_changes_halfway() -> None:
    """Ten frames of one object, 6 as number 1 and 4 as number 2: one switch; the better number agrees with 6 of 10 boxes."""
    scores = score_tracks(frames_of(*[({1: A}, {1: A})] * 6, *[({1: A}, {2: A})] * 4))
    assert (scores.misses, scores.false_positives, scores.switches) == (0, 0, 1)
    assert scores.mota == pytest.approx(1 - 1 / 10)
    assert scores.idf1 == pytest.approx(2 * 6 / (10 + 10))


def test_two_objects_that_exchange_numbers() -> None:
    scores = score_tracks(frames_of(*[({1: A, 2: B}, {1: A, 2: B})] * 3, *[({1: A, 2: B}, {1: B, 2: A})] * 2))
    assert scores.switches == 2
    assert scores.mota == pytest.approx(1 - 2 / 10)
    assert scores.idf1 == pytest.approx(2 * 6 / 20)


def test_misses_and_false_positives() -> None:
    """5 true boxes, 3 found, and 2 found where nothing is."""
    scores = score_tracks(frames_of(*[({1: A}, {1: A})] * 3, *[({1: A}, {1: FAR})] * 2))
    assert (scores.misses, scores.false_positives, scores.switches) == (2, 2, 0)
    assert scores.mota == pytest.approx(1 - 4 / 5)
    assert scores.idf1 == pytest.approx(2 * 3 / 10)


def test_a_switch_is_also_one_behind_a_gap() -> None:
    scores = score_tracks(frames_of(({1: A}, {1: A}), ({1: A}, {}), ({1: A}, {2: A})))
    assert (scores.misses, scores.switches) == (1, 1)


def test_a_pair_is_kept_while_it_agrees() -> None:
    """In the second frame number 2 fits better, but number 1 still agrees: no switch, as CLEAR MOT has it."""
    near = [0, 0, 10, 8]
    scores = score_tracks(frames_of(({1: A}, {1: A}), ({1: A}, {1: near, 2: A})))
    assert (scores.switches, scores.false_positives) == (0, 1)


def test_a_box_agrees_from_half_an_overlap_on() -> None:
    half, less = [0, 0, 10, 5], [0, 0, 10, 4.9]
    assert score_tracks(frames_of(({1: A}, {1: half}))).idf1 == 1
    assert score_tracks(frames_of(({1: A}, {1: less}))).idf1 == 0


@pytest.mark.parametrize("seed", range(6))
def test_idf1_is_that_of_the_best_choice_of_numbers(seed: int) -> None:
    """Against its definition with SciPy's assignment, of trajectories with false ones beside them (Ristani et al. 2016, section 3)."""
    rng = np.random.default_rng(seed)
    objects, numbers, frames = 4, 5, []
    for _ in range(30):
        truth = {n: [20 * n, 0, 20 * n + 10, 10] for n in range(objects) if rng.random() < 0.8}
        names = rng.permutation(numbers) if rng.random() < 0.2 else np.arange(numbers)
        found = {
            int(names[n]): [20 * n, 0, 20 * n + 10, 10 - rng.integers(0, 8)]
            for n in range(numbers)
            if rng.random() < 0.8
        }
        frames.append((truth, found))
    false_negatives = np.zeros((objects, numbers))
    false_positives = np.zeros((objects, numbers))
    for truth, found in frames:
        for t, f in itertools.product(range(objects), range(numbers)):
            agree = t in truth and f in found and truth[t][0] == found[f][0] and found[f][3] >= 5
            false_negatives[t, f] += t in truth and not agree
            false_positives[t, f] += f in found and not agree
    lengths = [sum(n in truth for truth, _ in frames) for n in range(objects)]
    shown = [sum(n in found for _, found in frames) for n in range(numbers)]
    size, never = objects + numbers, 1e9
    cost = np.full((size, size), never)
    cost[:objects, :numbers] = false_negatives + false_positives
    cost[range(objects), range(numbers, size)] = lengths  # an object that has no number, a number that has no object
    cost[range(objects, size), range(numbers)] = shown
    cost[objects:, numbers:] = 0
    wrong = cost[linear_sum_assignment(cost)].sum()
    boxes = sum(lengths) + sum(shown)
    assert score_tracks(frames_of(*frames)).idf1 == pytest.approx((boxes - wrong) / boxes)


def test_scores_of_nothing() -> None:
    nothing = score_tracks(frames_of(({}, {})))
    assert np.isnan(nothing.mota)
    assert np.isnan(nothing.idf1)
    assert score_tracks(frames_of(({1: A}, {}))).mota == 0
    assert score_tracks(frames_of(({}, {1: A}))).idf1 == 0


# -- trackers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRACKERS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_drawn_scenes_with_occlusion(name: str, seed: int) -> None:
    scores = score(make_tracker(name), Scene.drawn(seed))
    assert scores.idf1 >= 0.9
    assert scores.mota >= 0.85


@pytest.mark.parametrize("name", TRACKERS)
def test_the_same_boxes_give_the_same_numbers(name: str) -> None:
    one, other = make_tracker(name), make_tracker(name)
    for boxes in itertools.islice(found_in(Scene.drawn(1)), 60):
        first, second = one.update(boxes), other.update(boxes)
        assert first.ids is not None
        assert first.ids.tolist() == second.ids.tolist()
        assert len(set(first.ids.tolist())) == len(first)


@pytest.mark.parametrize("name", TRACKERS)
def test_an_object_behind_another_keeps_its_number(name: str) -> None:
    """Ten frames hidden while it moves on steadily."""
    tracker = make_tracker(name)
    seen = []
    for number in range(40):
        boxes = [[100 + 4 * number, 50, 150 + 4 * number, 120]] if not 15 <= number < 25 else []
        tracks = tracker.update(boxes_of(boxes))
        seen += tracks.ids.tolist()
    assert set(seen) == {1}
    assert len(seen) >= 28


@pytest.mark.parametrize("name", TRACKERS)
def test_two_that_cross_keep_their_numbers(name: str) -> None:
    tracker = make_tracker(name)
    first = last = None
    for number in range(50):
        left, right = 10 + 6 * number, 310 - 6 * number
        tracks = tracker.update(boxes_of([[left, 50, left + 40, 110], [right, 58, right + 40, 118]]))
        if len(tracks) == 2:
            order = tracks.ids[np.argsort(tracks.boxes.xyxy[:, 1])].tolist()
            first, last = first or order, order
    assert first == last


@pytest.mark.parametrize("name", TRACKERS)
def test_one_frame_of_noise_gets_no_number(name: str) -> None:
    tracker = make_tracker(name)
    for number in range(12):
        boxes = [[50, 50, 90, 90]] + ([[300, 300, 340, 340]] if number == 6 else [])
        tracks = tracker.update(boxes_of(boxes))
        assert tracks.ids.tolist() == [1]


def test_bytetrack_carries_tracks_on_with_doubtful_boxes() -> None:
    byte, strict = make_tracker("bytetrack", 0.5), make_tracker("ocsort", 0.5)
    lengths = []
    for tracker in (byte, strict):
        ids = [
            tracker.update(boxes_of([[50, 50, 90, 90]], conf=0.9 if n < 5 else 0.15)).ids.tolist() for n in range(10)
        ]
        lengths.append(sum(map(len, ids)))
    assert lengths == [10, 5]
    assert make_tracker("bytetrack", 0.5).update(boxes_of([[50, 50, 90, 90]], conf=0.15)).ids.tolist() == []


@pytest.mark.parametrize("name", TRACKERS)
def test_classes_are_followed_apart(name: str) -> None:
    tracker = make_tracker(name)
    for number in range(6):
        label = 0 if number < 3 else 1
        tracks = tracker.update(boxes_of([[50, 50, 90, 90]], labels=label))
    assert tracks.ids.tolist() == [2]
    assert tracks.labels == [NAMES[1]]


@pytest.mark.parametrize("name", TRACKERS)
def test_a_track_is_forgotten_behind_its_buffer(name: str) -> None:
    for gap, expected in ((25, [1]), (32, [2]), (10**9, [2])):
        tracker = make_tracker(name)
        box = boxes_of([[50, 50, 90, 90]])
        for _ in range(5):
            tracker.update(box)
        tracker.update(box, step=gap)  # frames that a live stream left out
        for _ in range(4):
            tracks = tracker.update(box)
        assert tracks.ids.tolist() == expected


@pytest.mark.parametrize("name", TRACKERS)
def test_boxes_that_are_none_are_left_out(name: str) -> None:
    trackers = Trackers(lambda: make_tracker(name))
    boxes = [[50, 50, 90, 90], [float("nan"), 0, 5, 5], [5, 5, 5, 9], [9, 9, 3, 3], [0, 0, float("inf"), 4]]
    for number in range(4):
        tracks = trackers.update(Frame("v", number, np.zeros((9, 9, 3), np.uint8)), boxes_of(boxes))
    assert tracks.boxes.xyxy.tolist() == [[50, 50, 90, 90]]
    assert tracks.ids.tolist() == [1]


@pytest.mark.parametrize("name", TRACKERS)
def test_growing_and_shrinking_to_nothing_stays_finite(name: str) -> None:
    tracker = make_tracker(name)
    for number in range(60):
        half = max(30 - number, 0.5)
        tracks = tracker.update(boxes_of([[100 - half, 100 - half, 100 + half, 100 + half]] if number < 30 else []))
        assert np.isfinite(tracks.boxes.xyxy).all()


def test_each_video_has_its_own_numbers() -> None:
    trackers = Trackers(lambda: make_tracker("bytetrack"))
    image = np.zeros((9, 9, 3), np.uint8)
    box = boxes_of([[50, 50, 90, 90]])
    for number in range(3):
        for path in ("a.mp4", "b.mp4"):
            assert trackers.update(Frame(path, number, image), box).ids.tolist() == [1]
    for name in ("1.jpg", "2.jpg", "3.jpg"):  # a video as images
        assert trackers.update(Frame(f"shots/{name}", None, image), box).ids.tolist() == [1]
    assert trackers.update(Frame("a.mp4", 0, image), box).ids.tolist() == [1], "a video that starts again"


def test_unknown_trackers_are_named() -> None:
    with pytest.raises(ValueError, match="'botsort' is not a tracker; choose one of bytetrack, ocsort"):
        make_tracker("botsort")


# -- detections with ids -------------------------------------------------------------------------------------------


def test_ids_follow_their_boxes() -> None:
    found = dataclasses.replace(
        boxes_of([[0, 0, 4, 4], [9, 9, 12, 12]], conf=[0.5, 0.9], labels=[0, 1]), ids=np.array([3, 5])
    )
    assert found[1].ids.tolist() == [5]
    assert found.of(NAMES[0]).ids.tolist() == [5]
    assert [one["id"] for one in found.to_json()] == [3, 5]
    assert "id" not in boxes_of([[0, 0, 4, 4]]).to_json()[0]


# -- counting ------------------------------------------------------------------------------------------------------


def walk(counter, *centres, id=1, label=0):
    for x, y in centres:
        counter.update(dataclasses.replace(boxes_of([[x - 2, y - 2, x + 2, y + 2]], labels=label), ids=np.array([id])))


def test_crossings_are_counted_by_direction() -> None:
    line = LineCount([(50, 100), (50, 0)])  # upwards: the right hand is at greater x
    walk(line, (30, 50), (45, 50), (55, 50), (70, 50))
    assert line.to_json() == {"to_right": {NAMES[0]: 1}, "to_left": {}}
    walk(line, (45, 50), id=1)
    walk(line, (60, 30), (40, 30), id=2, label=1)
    assert line.to_json() == {"to_right": {NAMES[0]: 1}, "to_left": {NAMES[0]: 1, NAMES[1]: 1}}
    assert str(line) == f"1 {NAMES[0]} to the right, 1 {NAMES[1]}, 1 {NAMES[0]} to the left"


def test_touching_or_passing_beside_the_line_does_not_count() -> None:
    line = LineCount([(50, 100), (50, 0)])
    walk(line, (40, 50), (50, 50), (50, 60), (40, 60))  # onto the line and back
    walk(line, (40, 130), (60, 130), id=2)  # beyond its end
    assert line.to_json() == {"to_right": {}, "to_left": {}}
    walk(line, (40, 50), (50, 50), (60, 50), id=3)  # with a stop on it
    assert line.to_json()["to_right"] == {NAMES[0]: 1}
    walk(line, (40, 50), id=4)
    walk(line, (60, 50), id=5)  # another object on the other side
    assert sum(line.to_right.values()) == 1


def test_zones_count_who_is_inside_and_who_has_been() -> None:
    zone = ZoneCount([(0, 0), (100, 0), (100, 100), (50, 50), (0, 100)])  # with a notch from below
    walk(zone, (50, 20), (50, 90), (50, 20))
    assert zone.to_json() == {"inside": {NAMES[0]: 1}, "entered": {NAMES[0]: 1}}, "it came back: one object"
    walk(zone, (50, 90), id=2)
    assert zone.to_json() == {"inside": {}, "entered": {NAMES[0]: 1}}, "the notch is outside"
    walk(zone, (10, 80), id=3)
    assert zone.entered[NAMES[0]] == 2


def test_lines_and_zones_are_drawn_with_their_counts() -> None:
    image = np.full((400, 600, 3), 90, np.uint8)
    found = dataclasses.replace(boxes_of([[50, 50, 90, 90]]), image=image, ids=np.array([4]))
    counts = LineCount([(500, 350), (500, 50)]), ZoneCount([(150, 100), (400, 100), (400, 300), (150, 300)])
    marked = Prediction("a#0", "a-0", "a", 0, None, image, found, counts).marked()
    changed = (marked != image).any(axis=2)
    assert changed[60:320, 500].all()
    assert changed[110:290, 400].all()
    assert changed[110:290, 150].all()
    assert not changed[130:280, 170:380].any()
    assert (image == 90).all()


def test_counters_forget_those_that_are_gone() -> None:
    zone, line = ZoneCount([(0, 0), (9, 0), (9, 9)]), LineCount([(0, 0), (9, 9)])
    for id in range(1, 2000):
        for counter in (zone, line):
            walk(counter, (50, 50.5), id=id)
    assert max(len(zone._seen._notes), len(line._seen._notes)) <= 600


@pytest.mark.parametrize(
    ("make", "points", "message"),
    [
        (LineCount, [(0, 0)], r"a line has 2 points \(x, y\), got an array of shape \(1, 2\)"),
        (LineCount, [(3, 3), (3, 3)], r"a line needs two points, got \[3.0, 3.0\] twice"),
        (LineCount, [(0, 0), (float("nan"), 3)], "must be finite"),
        (ZoneCount, [(0, 0), (1, 1)], "a zone has 3 or more points"),
        (ZoneCount, [(0, 0), (10, 10), (10, 0), (0, 10)], "the sides of a zone must not cross: side 1 crosses side 3"),
    ],
)
def test_invalid_lines_and_zones_are_refused(make, points, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(points)


def test_untracked_boxes_cannot_be_counted() -> None:
    with pytest.raises(ValueError, match="have no ids"):
        LineCount([(0, 0), (1, 1)]).update(boxes_of([A]))
