"""Ids in the order in which they were minted."""

from gpusched.model.ids import id_key, mint, minted_at


def test_numbers_count_as_numbers_and_a_row_of_tasks_is_where_its_first_one_is() -> None:
    order = ["a", "a_0", "a_2", "a_[4,7]", "a_9", "a_[10-39]", "b", "12", "12+1", "12_[3]", "12_40", "100", "100~2"]
    assert sorted(reversed(order), key=id_key) == order


def test_ids_of_foreign_logs_are_ordered_whatever_they_are() -> None:
    strange = ["]", "[", ",]", "1+x", "1~y", "9" * 5000, "1_["]
    assert sorted(sorted(strange, key=id_key), key=id_key) == sorted(strange, key=id_key)


def test_ids_of_one_process_increase_within_a_millisecond_and_when_its_clock_is_set_back_a_little() -> None:
    now = 1_800_000_000.0
    made = [mint(now - back / 100) for back in range(100) for _ in range(100)]
    assert made == sorted(set(made))
    assert 0 <= minted_at(made[-1]) - now < 1, "they contain their time"
    assert minted_at(mint(now - 3600)) < now - 3599, "a clock that was wrong by more is right again"
