"""A check of `pagestream doctor`: may the user of the store's URL do all that a gateway or a worker does? Read-only.

It tries the commands, keys and channels of users.acl one by one with ACL DRYRUN, which runs nothing.
"""

from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError

from pagestream.finding import Finding

RULES = Path(__file__).with_name("users.acl")  # the same as deploy/kustomize/base/users.acl
PROGRAMS = ("gateway", "worker")
MAX_ARGUMENTS = 6  # XREADGROUP needs 6
MAX_NAMED = 5
OF_CHANNELS = ("+publish", "+subscribe", "+unsubscribe")
CHECK = "store user"


async def check_permissions(client: Redis) -> Finding:
    """Return whether the client's user has the permissions of a program, and which it lacks.

    Raises:
        RedisError: If the store does not answer.
    """
    try:
        user = str(await client.acl_whoami())
        missing = {program: await _missing(client, user, trials_of(program)) for program in PROGRAMS}
    except NoPermissionError:
        hint = "give it +acl|whoami and +acl|dryrun, or name another user in the URL"
        return Finding(CHECK, "warn", "not checked: it may not run ACL WHOAMI and ACL DRYRUN", hint)
    permitted = [program for program in PROGRAMS if not missing[program]]
    if permitted:
        return Finding(CHECK, "ok", f"{user} may do all that a {' or a '.join(permitted)} does")
    program = min(PROGRAMS, key=lambda one: len(missing[one]))
    named = ", ".join(missing[program][:MAX_NAMED])
    more = len(missing[program]) - MAX_NAMED
    found = f"{user} may not do all that a {program} does: {named}{f' and {more} more' if more > 0 else ''}"
    return Finding(CHECK, "fail", found, f"give it the rights of `user {program}` in deploy/kustomize/base/users.acl")


def trials_of(program: str) -> dict[str, list[str]]:
    """Return a command for each rule of a program's user; the command is permitted only with the rule."""
    (line,) = [line for line in RULES.read_text().splitlines() if line.startswith(f"user {program} ")]
    trials: dict[str, list[str]] = {}
    key, channel = (next(_sample(word[1:]) for word in line.split() if word.startswith(mark)) for mark in "~&")
    for word in line.split():
        if word.startswith("+"):
            trials[word] = [*word[1:].split("|"), *[channel if word in OF_CHANNELS else key] * MAX_ARGUMENTS]
        elif word.startswith("~"):
            trials[word] = ["DEL", _sample(word[1:])]
        elif word.startswith("%R~"):
            trials[word] = ["EXISTS", _sample(word[3:])]
        elif word.startswith("&"):
            trials[word] = ["PUBLISH", _sample(word[1:]), ""]
    return trials


def _sample(pattern: str) -> str:
    return pattern.replace("*", "doctor")


async def _missing(client: Redis, user: str, trials: dict[str, list[str]]) -> list[str]:
    """Try the commands with fewer and fewer arguments, until their number is right.

    What stays undecided is missing: this store does not know the command.
    """
    permitted, refused = set[str](), set[str]()
    for num_words in range(max(map(len, trials.values())), 0, -1):
        undecided = trials.keys() - permitted - refused
        async with client.pipeline(transaction=False) as pipeline:
            for rule in undecided:
                pipeline.acl_dryrun(user, *trials[rule][:num_words])
            replies = await pipeline.execute(raise_on_error=False)
        for rule, reply in zip(undecided, replies, strict=True):
            if isinstance(reply, NoPermissionError):
                raise reply
            if not isinstance(reply, ResponseError):  # the number of arguments is right
                (permitted if reply == b"OK" else refused).add(rule)
    return [rule for rule in trials if rule not in permitted]
