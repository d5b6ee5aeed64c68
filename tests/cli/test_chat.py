"""`mlxrt chat` from a pipe: each line a turn, the answers those of a session."""

import mlxrt


def chat(cli, folder, *lines: str, flags=()):
    return cli("chat", "-m", folder, "-n", 8, *flags, stdin="".join(f"{line}\n" for line in lines).encode())


def answers(folder, *lines: str, system=None) -> list[str]:
    """What Python answers."""
    with mlxrt.load(str(folder)) as engine:
        session = engine.session(system, max_tokens=8)
        return [session.say(line).text for line in lines]


def test_answers_are_those_of_a_session(cli, folder):
    result = chat(cli, folder, "hello", "again", flags=("--system", "Be brief."))
    assert result.code == 0
    assert result.out == "".join(f"{a}\n" for a in answers(folder, "hello", "again", system="Be brief."))
    timing = [line for line in result.err.splitlines() if "prompt tokens" in line]
    assert len(timing) == 2 and " 0 cached " in timing[0] and " 0 cached " not in timing[1]


def test_undo_removes_questions_and_answers(cli, folder):
    one = answers(folder, "hello", "other")
    result = chat(cli, folder, "hello", "again", "/undo", "other")
    assert result.out.endswith(f"{one[1]}\n") and "1 turns are left" in result.err
    both = chat(cli, folder, "hello", "again", "/undo 2", "other")
    assert both.out.endswith(f"{answers(folder, 'other')[0]}\n")


def test_clear_keeps_the_system_message(cli, folder):
    result = chat(cli, folder, "hello", "/clear", "other", flags=("--system", "Be brief."))
    assert result.out.endswith(f"\n{answers(folder, 'other', system='Be brief.')[0]}\n")


def test_save_and_load_go_on_where_it_was(cli, folder, tmp_path):
    saved = tmp_path / "chat.safetensors"
    chat(cli, folder, "hello", f"/save {saved}")
    result = chat(cli, folder, f"/load {saved}", "again")
    assert result.code == 0
    assert result.out == f"{answers(folder, 'hello', 'again')[1]}\n"
    assert " 0 cached" not in result.err


def test_stats_and_help(cli, folder):
    result = chat(cli, folder, "hello", "/stats", "/help", "/exit", "never")
    assert result.code == 0 and result.out.count("\n") == answers(folder, "hello")[0].count("\n") + 1
    assert "1 turns" in result.err and "prefix cache: 0 hits" in result.err and "/save FILE" in result.err


def test_a_failed_line_is_reported_and_the_chat_goes_on(cli, folder, tmp_path):
    wrong = ["/fly", "/undo 9", "/undo x", "/save", "/load /nowhere/at.all", f"/save {tmp_path}/no/where", "/clear x"]
    result = chat(cli, folder, *wrong, "x" * 5000, "hello")
    assert result.out == f"{answers(folder, 'hello')[0]}\n"
    errors = [line for line in result.err.splitlines() if line.startswith("mlxrt: ")]
    assert len(errors) == len(wrong) + 1 and "Traceback" not in result.err
    assert result.code == 2  # of the last failure, from a pipe


def test_bytes_that_are_no_text_cost_one_turn(cli, folder):
    result = cli("chat", "-m", folder, "-n", 8, stdin=b"\xff\xfe\nhello\n")
    assert result.out == f"{answers(folder, 'hello')[0]}\n" and "not UTF-8" in result.err


def test_empty_lines_are_ignored(cli, folder):
    assert chat(cli, folder, "", "  ").out == ""
