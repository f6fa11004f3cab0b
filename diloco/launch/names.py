"""Names of runs: two words that a person can say over the telephone."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

HOW = (
    "amber brave brisk calm clever coral crisp deft eager early fair fleet fond gentle glad golden hardy "
    "hazel honest ivory jolly keen kind lilac lively loyal lucid mellow merry mild misty modest neat nimble "
    "noble olive patient placid plucky polar proud quick quiet rapid ready ruby rustic sage sandy serene "
    "silver sober solar spry steady stout sunny swift tidy tranquil trusty upbeat velvet vivid warm wise witty"
)
WHO = (
    "avocet badger beaver bison bittern bobcat caribou cicada condor coyote crane curlew dingo dolphin dunlin "
    "egret ermine falcon ferret finch gannet gecko gibbon gopher grouse heron hornet ibex ibis jackal jackdaw "
    "kestrel kiwi koala lemur linnet lizard llama lynx magpie marlin marmot marten merlin moose newt ocelot "
    "osprey otter panda petrel pigeon plover puffin quail raven robin salmon seal shrike skylark stork swallow "
    "tapir tern thrush toucan turtle viper vole walrus weasel whale wombat wren zebra"
)
TRIES = 100


def new_name(is_taken: Callable[[str], bool]) -> str:
    """A name that is not taken, such as ``nimble-otter``; after many tries with a number behind."""
    how, who = HOW.split(), WHO.split()
    for attempt in range(TRIES):
        name = f"{secrets.choice(how)}-{secrets.choice(who)}" + (f"-{attempt}" if attempt > TRIES // 2 else "")
        if not is_taken(name):
            return name
    return f"{secrets.choice(how)}-{secrets.choice(who)}-{secrets.token_hex(4)}"
