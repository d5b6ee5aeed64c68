"""`mlxrt chat` from a pipe: each line a turn, the answers those of a session."""

import mlxrt


def talk(cli, folder, *lines: str, flags=()):
    return cli("chat", "-m", folder, "-n", 8, *flags, stdin="".join(f"{line}\n" for line in lines).encode())


def answers(folder, *lines: str, system=None) -> list[str]:
    """What Python answers."""
    with mlxrt.load(str(folder)) as engine:
        session = engine.session(system, max_tokens=8)
        return [session.say(line).text for line in lines]


def test_turns_are_those_of_a_session(cli, folder):
    result = talk(cli, folder, "hello", "again", flags=("--system", "Be brief."))
    assert result.code == 0
    assert result.out == "".join(f"{a}\n" for a in answers(folder, "hello", "again", system="Be brief."))
    timing = [line for line in result.err.splitlines() if "prompt tokens" in line]
    assert len(timing) == 2 and " 0 cached " in timing[0] and " 0 cached " not in timing[1]


def test_undo_forgets_turns(cli, folder):
    one = answers(folder, "hello", "other")
    result = talk(cli, folder, "hello", "again", "/undo", "other")
    assert result.out.endswith(f"{one[1]}\n") and "1 turns are left" in result.err
    both = talk(cli, folder, "hello", "again", "/undo 2", "other")
    assert both.out.endswith(f"{answers(folder, 'other')[0]}\n")


def test_clear_keeps_the_system_message(cli, folder):
    result = talk(cli, folder, "hello", "/clear", "other", flags=("--system", "Be brief."))
    assert result.out.endswith(f"\n{answers(folder, 'other', system='Be brief.')[0]}\n")


def test_save_and_load_go_on_where_it_was(cli, folder, tmp_path):
    saved = tmp_path / "talk.safetensors"
    talk(cli, folder, "hello", f"/save {saved}")
    result = talk(cli, folder, f"/load {saved}", "again")
    assert result.code == 0
    assert result.out == f"{answers(folder, 'hello', 'again')[1]}\n"
    assert " 0 cached" not in result.err


def test_stats_and_help(cli, folder):
    result = talk(cli, folder, "hello", "/stats", "/help", "/exit", "never")
    assert result.code == 0 and result.out.count("\n") == answers(folder, "hello")[0].count("\n") + 1
    assert "1 turns" in result.err and "prefix cache: 0 hits" in result.err and "/save FILE" in result.err


def test_a_turn_that_fails_is_told_and_the_next_one_comes(cli, folder, tmp_path):
    wrong = ["/fly", "/undo 9", "/undo x", "/save", "/load /nowhere/at.all", f"/save {tmp_path}/no/where", "/clear x"]
    result = talk(cli, folder, *wrong, "x" * 5000, "hello")
    assert result.out == f"{answers(folder, 'hello')[0]}\n"
    told = [line for line in result.err.splitlines() if line.startswith("mlxrt: ")]
    assert len(told) == len(wrong) + 1 and "Traceback" not in result.err
    assert result.code == 2  # nobody watches a pipe


def test_bytes_that_are_no_text_cost_one_turn(cli, folder):
    result = cli("chat", "-m", folder, "-n", 8, stdin=b"\xff\xfe\nhello\n")
    assert result.out == f"{answers(folder, 'hello')[0]}\n" and "not UTF-8" in result.err


def test_empty_lines_are_no_turns(cli, folder):
    assert talk(cli, folder, "", "  ").out == ""
