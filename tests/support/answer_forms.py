"""Regexes and grammars to hold answers to, each with what tells whether a text is of the form."""

REGEXES = (
    r"[a-z]+", r"[A-Z][a-z]{2,8}", r"\d{3}-\d{4}", r"(yes|no)", r"(yes|no)(, (yes|no)){0,3}", r"a*b+c?", r"(ab)+",
    r"[^\n]{1,40}", r"[ -~]{5,30}", r"\w+ \w+ \w+\.", r"[+-]?\d+(\.\d+)?", r"0x[0-9a-fA-F]{1,8}", r"#[0-9a-f]{6}",
    r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])", r"([01]\d|2[0-3]):[0-5]\d", r"(\d{1,3}\.){3}\d{1,3}",
    r"[a-z0-9._]+@[a-z0-9]+\.(com|org|net)", r"https?://[a-z]{1,20}\.[a-z]{2,3}(/[a-z0-9]{0,9}){0,3}",
    r"\$\d{1,3}(,\d{3})*\.\d{2}", r"[A-Z]{2}\d{2}( \d{4}){4}", r"\(\d{3}\) \d{3}-\d{4}", r"v\d+\.\d+\.\d+(-rc\d)?",
    r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", r"(Mon|Tue|Wed|Thu|Fri|Sat|Sun)day",
    r"<b>[^<>]{1,20}</b>", r"\[[0-9]+(, [0-9]+)*\]", r'"[^"\\]{0,20}"', r"'([^'\\]|\\.){0,15}'", r"\{[a-z]+\}",
    r"(a|b|c)(d|e|f)(g|h|i)", r"(x{2}){3}", r"x{0,5}y", r"(foo|foobar|foob)", r"(a|ab)(c|bcd)", r"[\u00e0-\u00ff]{3}",
    r"[\u4e00-\u9fff]{2,6}", r"(\u65e5\u672c|\u6771\u4eac)", r"[\u03b1-\u03c9]+", r".{10}", r"[\s\S]{3,9}x",
    r"\t?[a-z]+\n", r"(- [a-z ]{3,15}\n){2,4}", r"Q: [^\n?]{3,30}\?\nA: [^\n]{3,30}", r"[^aeiou\n]{4}", r"[\]\[]{2,4}",
    r"[-a-z]{3,9}", r"[\^x]+!", r"\\[nrt]", r"\*{1,3}", r"(?:ha){2,5}!", r"(?i:hello) world", r"[a-z]?x|[xyz]",
    r"(one|two|three) (red|blue) (cats|dogs)", r"([a-c]\d){2,}z", r"((a|b)(c|d)?)+e", r"(a?){5}b", r"(a*)*b",
    r"1(01*0)*1", r"\d+(st|nd|rd|th)", r"[A-Za-z]+(?:'[a-z]+)?(?: [A-Za-z]+){1,4}[.!?]",
)  # fmt: skip

WORD = "/[a-z]{1,10}/"
# What llguidance is given, Lark or GBNF, and the same in Lark for the check (None: as given).
GRAMMARS: tuple[tuple[str, str | None], ...] = (
    ('start: "(" start? ")"', None),
    ('start: "a" start "b" | "ab"', None),
    (f"start: noun verb noun\nnoun: {WORD} \" \"\nverb: {WORD} \" \"", None),
    ('start: expr\nexpr: term (("+" | "-") term)*\nterm: /[0-9]{1,4}/ | "(" expr ")"', None),
    ('start: expr\nexpr: term (("+"|"-") term)*\nterm: atom (("*"|"/") atom)*\natom: /[0-9]{1,3}/ | "(" expr ")"',
     None),
    ('start: item ("," item)*\nitem: /[a-z]{1,8}/', None),
    ('start: pair ("&" pair)*\npair: /[a-z]{1,8}/ "=" /[a-z0-9]{1,8}/?', None),
    ('start: "[" [start ("," start)*] "]"', None),
    ('start: value\nvalue: "{" [pair ("," pair)*] "}" | /[0-9]{1,3}/\npair: /"[a-z]{1,5}"/ ":" value', None),
    ('start: "if " cond " then " act\ncond: /[a-z]{1,6}/ (" and " cond)?\nact: "go" | "stop" | start', None),
    ('start: "SELECT " cols " FROM " /[a-z]{1,9}/ where?\ncols: "*" | /[a-z]{1,9}/ (", " /[a-z]{1,9}/)*\n'
     'where: " WHERE " /[a-z]{1,9}/ " = " /[0-9]{1,4}/', None),
    ('start: "<a>" body "</a>"\nbody: (/[a-z ]{1,12}/ | start)?', None),
    ('start: digit~4\ndigit: /[0-9]/', None),
    ('start: (LETTER DIGIT)+\nLETTER: "a".."f"\nDIGIT: "0".."9"', None),
    ('start: "yes"i | "no"i', None),
    ('start: s\ns: "x" | "y" s "y"', None),
    ('start: "0" | ("1" | "2") rest*\nrest: /[0-9]/', None),
    ('start: line+\nline: "- " /[A-Za-z ]{2,20}/ "\\n"', None),
    ('start: greet ", " /[A-Z][a-z]{1,9}/ "!"\ngreet: "Hello" | "Hi" | "Good " part\npart: "morning" | "evening"',
     None),
    ('start: call\ncall: NAME "(" [arg ("," arg)*] ")"\narg: call | NUM\nNAME: /[a-z]{1,6}/\nNUM: /[0-9]{1,3}/',
     None),
    ('root ::= "yes" | "no"', 'start: "yes" | "no"'),
    ('root ::= [a-z]+ "!"', 'start: /[a-z]+/ "!"'),
    ('root ::= "(" root? ")"', 'start: "(" start? ")"'),
    ('root ::= "a" root "b" | "ab"', 'start: "a" start "b" | "ab"'),
    ('root ::= item ("," item)*\nitem ::= [0-9]{1,3}', 'start: /[0-9]{1,3}(,[0-9]{1,3})*/'),
    ('root ::= "[" ("0" | "1"){2,4} "]"', r"start: /\[[01]{2,4}\]/"),
    ('root ::= expr\nexpr ::= term (("+" | "-") term)*\nterm ::= [0-9]+ | "(" expr ")"',
     'start: term (("+" | "-") term)*\nterm: /[0-9]+/ | "(" start ")"'),
    ('root ::= word (" " word){2,5} "."\nword ::= [a-zA-Z]{1,9}', r"start: /[a-zA-Z]{1,9}( [a-zA-Z]{1,9}){2,5}\./"),
    ('root ::= [A-Z] [a-z]{0,8}', 'start: /[A-Z][a-z]{0,8}/'),
    ('root ::= "\\"" [^"\\\\\\n]{0,20} "\\""', r'start: /"[^"\\\n]{0,20}"/'),
    ('root ::= sign? [0-9]+ ("." [0-9]+)?\nsign ::= "-" | "+"', r"start: /[-+]?[0-9]+(\.[0-9]+)?/"),
    ('# a list\nroot ::= ("- " [a-z ]{3,15} "\\n"){2,3}', r"start: /(- [a-z ]{3,15}\n){2,3}/"),
    ('root ::= "x"* "y"', "start: /x*y/"),
    ('root ::= ("ab" | "cd")+ "e"?', "start: /(ab|cd)+e?/"),
    ('root ::= a | b\na ::= "1" b?\nb ::= "2" a?', 'start: a | b\na: "1" b?\nb: "2" a?'),
    ('root ::= object\nobject ::= "{" ws "\\"n\\":" ws [0-9]{1,4} ws "}"\nws ::= [ \\n]{0,3}',
     r'start: /\{[ \n]{0,3}"n":[ \n]{0,3}[0-9]{1,4}[ \n]{0,3}\}/'),
    ('root ::= move (" " move){1,4}\nmove ::= [a-h] [1-8] [a-h] [1-8]',
     "start: /[a-h][1-8][a-h][1-8]( [a-h][1-8][a-h][1-8]){1,4}/"),
    ('root ::= "<" tag ">" root? "</>"\ntag ::= [a-z]{1,4}', 'start: "<" /[a-z]{1,4}/ ">" start? "</>"'),
    ('root ::= [\\x41-\\x5A]{3}', "start: /[A-Z]{3}/"),
    ('root ::= "caf\\u00E9" | "th\\u00E9"', 'start: "caf\u00e9" | "th\u00e9"'),
)  # fmt: skip


def parses_as(twin: str):
    """A test of texts by the lark package."""
    from lark import Lark
    from lark.exceptions import LarkError

    parser = Lark(twin, parser="earley", lexer="dynamic_complete")

    def fits(text: str) -> bool:
        try:
            parser.parse(text)
        except LarkError:
            return False
        return True

    return fits
