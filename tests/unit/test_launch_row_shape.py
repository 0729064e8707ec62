"""Rows with "question"/"answer" columns become conversations, from every kind of source, map-style and streamed."""

from __future__ import annotations

import json
import pickle

import pytest
from datasets import Dataset, IterableDataset

from asyncgrpo_core.errors import DataError
from asyncgrpo_core.launch.config import DataSection
from asyncgrpo_core.launch.dataset import load_heldout_rows, load_train_dataset
from asyncgrpo_core.launch.row_shape import RowShape, fill

TEMPLATE = [{"role": "system", "content": "Be {{brief}}."}, {"role": "user", "content": "{question} ({level})"}]
ROWS = [{"question": f"{i}+1?", "answer": str(i + 1), "level": i} for i in range(5)]
SHAPED = {
    "question": "3+1?",
    "level": 3,
    "solution": "4",
    "prompt": [{"role": "system", "content": "Be {brief}."}, {"role": "user", "content": "3+1? (3)"}],
}


def section(**changes) -> DataSection:
    return DataSection(**{"prompt_template": TEMPLATE, "rename": {"answer": "solution"}, **changes})


def rows_for_test():
    return ROWS


def stream_for_test():
    return Dataset.from_list(ROWS).to_iterable_dataset()


def write(path):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif path.suffix == ".csv":
        Dataset.from_list(ROWS).to_csv(path, index=False)
    else:
        Dataset.from_list(ROWS).to_parquet(path)
    return str(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
@pytest.mark.parametrize("streaming", [False, True])
def test_files_become_conversations(tmp_path, suffix, streaming) -> None:
    source = write(tmp_path / f"rows{suffix}")
    dataset = load_train_dataset(section(train=source, streaming=streaming))
    assert isinstance(dataset, IterableDataset if streaming else Dataset)
    rows = list(dataset)
    assert (
        len(rows) == 5 and {**rows[3], "level": int(rows[3]["level"]), "solution": str(rows[3]["solution"])} == SHAPED
    )
    heldout = load_heldout_rows(section(heldout=source), 4)
    assert len(heldout) == 4 and heldout[3]["prompt"] == SHAPED["prompt"]


@pytest.mark.parametrize(("name", "kind"), [("rows_for_test", Dataset), ("stream_for_test", IterableDataset)])
def test_import_paths_give_map_style_and_iterable_datasets(name, kind) -> None:
    dataset = load_train_dataset(section(train=f"tests.unit.test_launch_row_shape:{name}"))
    assert isinstance(dataset, kind) and list(dataset)[3] == SHAPED
    again = pickle.loads(pickle.dumps(dataset))  # it travels to the rollout process
    assert next(iter(again))["prompt"][1]["content"] == "0+1? (0)"


def test_a_hub_id_may_be_a_local_folder(tmp_path) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train-0.parquet")
    dataset = load_train_dataset(section(train=str(tmp_path)))
    assert list(dataset)[3] == SHAPED


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{qestion}", "Did you mean `question`"),
        ("{}", "is no column"),
        ("{question.upper}", "is no column"),
        ("{question!r}", "is no column"),
        ("{question:>9}", "is no column"),
        ("{question", "cannot be read"),
    ],
)
def test_a_template_that_names_no_column_is_refused(template, message) -> None:
    with pytest.raises(DataError, match=message):
        fill(template, ROWS[0])


def test_braces_in_the_data_are_left_alone() -> None:
    assert fill("{question}", {"question": "{answer} {0}"}) == "{answer} {0}"


@pytest.mark.parametrize(
    ("changes", "row", "message"),
    [
        ({}, {"question": "q", "level": 1}, "no column 'answer'"),
        ({}, {**ROWS[0], "solution": "s"}, "already"),
        ({"rename": {}}, {**ROWS[0], "prompt": [{"role": "user", "content": "x"}]}, "makes one too"),
    ],
)
def test_a_row_that_does_not_fit_is_refused(changes, row, message) -> None:
    with pytest.raises(DataError, match=message):
        RowShape(section(**changes))(row)


def test_the_section_is_checked_when_it_is_parsed() -> None:
    with pytest.raises(ValueError, match="prompt_template.0 has the keys"):
        section(prompt_template=[{"role": "user"}])
    with pytest.raises(ValueError, match="both say where the prompt comes from"):
        section(prompt_column="messages")


def test_f012_an_image_column_is_refused(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": [{"role": "user", "content": "x"}], "images": ["a.png"]}) + "\n")
    with pytest.raises(DataError, match='column "images" holds an image.*remove_columns'):
        load_train_dataset(DataSection(train=str(path)))
