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
    assert result.err.count("the answer ended by max_tokens 8; /set max_tokens raises it") == 2


def test_three_quotes_hold_a_message_of_several_lines(cli, folder):
    result = chat(cli, folder, '"""first', "  second", 'third"""', '"""one line"""', '"""', "framed", '"""')
    assert result.out == "".join(f"{a}\n" for a in answers(folder, "first\n  second\nthird", "one line", "framed"))
    open_end = chat(cli, folder, '"""first', "hello")
    assert open_end.out == "" and "the input ended inside" in open_end.err and open_end.code == 2


def test_a_path_is_a_question_and_an_unknown_command_is_not(cli, folder):
    assert chat(cli, folder, "/etc/hosts says").out == f"{answers(folder, '/etc/hosts says')[0]}\n"
    result = chat(cli, folder, "/retri")
    assert result.out == "" and "there is no command /retri; did you mean /retry?" in result.err


def test_retry_asks_the_last_question_again(cli, folder):
    result = chat(cli, folder, "/retry", "hello", "again", "/retry", "other")
    first, second, third = answers(folder, "hello", "again", "other")
    assert result.out == f"{first}\n{second}\n{second}\n{third}\n"
    assert "there is no question to ask again" in result.err and result.err.count("the answer will be the same") == 1


def test_set_changes_the_options_of_the_answers_that_follow(cli, folder):
    with mlxrt.load(str(folder)) as engine:
        session = engine.session(max_tokens=8)
        want = [session.say("hello").text, session.say("again", temperature=0.9, seed=3, max_tokens=5, stop="q").text]
        session.rewind()
        want.append(session.say("again", temperature=0.9, seed=4, max_tokens=5, stop="q").text)
    lines = ("hello", "/set temp 0.9", "/set seed 3", "/set max-tokens 5", "/set stop q", "again")
    result = chat(cli, folder, *lines, "/set seed 4", "/retry")
    assert result.out == "".join(f"{a}\n" for a in want)
    assert "temperature is 0.9" in result.err and "stop is ('q',)" in result.err
    assert "the answer will be the same" not in result.err
    listed = chat(cli, folder, "/set", flags=("--top-k", 7))
    assert "top_k              7" in listed.err and "max_tokens         8" in listed.err


def test_set_refuses_what_is_no_option_or_no_value(cli, folder):
    wrong = ["/set temprature 1", "/set temperature hot", "/set temperature -1", "/set top_p", "/set ignore_eos maybe"]
    result = chat(cli, folder, *wrong, "/set logprobs 3", "hello")
    assert result.out == f"{answers(folder, 'hello')[0]}\n"
    assert result.err.count("mlxrt: ") == 6 and "Traceback" not in result.err


def test_undo_removes_questions_and_answers(cli, folder):
    one = answers(folder, "hello", "other")
    result = chat(cli, folder, "hello", "again", "/undo", "other")
    assert result.out.endswith(f"{one[1]}\n") and "1 turn left" in result.err
    both = chat(cli, folder, "hello", "again", "/undo 2", "other")
    assert both.out.endswith(f"{answers(folder, 'other')[0]}\n")


def test_clear_keeps_the_system_message(cli, folder):
    result = chat(cli, folder, "hello", "/clear", "other", flags=("--system", "Be brief."))
    assert result.out.endswith(f"\n{answers(folder, 'other', system='Be brief.')[0]}\n")


def test_another_system_message_begins_anew(cli, folder):
    result = chat(cli, folder, "/system", "hello", "/system Be brief.", "other", "/clear", "other", "/system")
    brief = answers(folder, "other", system="Be brief.")[0]
    assert result.out == f"{answers(folder, 'hello')[0]}\n{brief}\n{brief}\n"
    assert "there is no system message" in result.err and result.err.count("system message: Be brief.") == 2


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
    assert "1 turn," in result.err and "prefix cache: 0 hits" in result.err and "/save FILE" in result.err


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
