"""The fixed vocabulary of the generated tasks: common words that the tokenizer keeps whole."""

from __future__ import annotations

_NOUNS = """
acorn actor alarm angel anchor ant apple apron arrow badge baker banjo barn basket beach beak bean bear bell bench
berry bike bird blade blanket boat bone book boot bottle bow bowl box bread brick bridge broom brush bucket bus
butter button cabin cake camel camera candle canoe cap car card carrot castle cat cave chain chair chalk cheese
cherry chess circle clock cloud clover coat coin comb cookie copper corn cotton cow crab crane crayon cream crow
crown cup curtain daisy deer desk dinner dish doctor dog doll donkey door dove dragon drum duck dust eagle ear
earth egg elbow engine fan farm feather fence fern field finger fire fish flag flame flower flute fog fork forest
fox frog fruit garden gate ghost giant gift glass glove goat gold goose grape grass guitar hammer hand harbor hat
hawk heart hill hook horn horse hotel house ice ink iron island jacket jar jelly jewel juice jungle kettle king
kite kitten knife knot ladder lake lamp leaf lemon letter light lily lion lizard lock maple market mask meadow
melon milk mirror moon moss motor mouse mud music nail needle nest net night nose nut oak ocean olive onion orange
owl paint palm panda paper park peach pear pearl pen pepper piano pie pig pillow pilot pine pipe planet plate plum
pocket pond pony potato prince pump puppy purse queen quilt rabbit rain ring river robin rock roof rope rose
rug sail salt sand scarf school seed shark sheep shell ship shirt shoe silk silver sky smoke snail snake snow soap
sock song spider spoon spring star stone storm straw sugar summer sun swan sword table tea tent thread tiger toast
tooth towel tower toy train tree truck tulip turtle violin wagon wall water whale wheat wheel wind window wing
winter wolf wood wool yard zebra
"""
WORDS = tuple(_NOUNS.split())
"""Nouns, one token each with and without a space before them."""

_NAMES = """
Adam Alice Anna Ben Clara David Emma Eva Felix Grace Henry Iris Jack Julia Leo Lucy Max Mia Noah Nora Oscar Paul Rosa
Ruth Sam Sara Tom Vera Will Zoe
"""
_CITIES = """
Athens Berlin Boston Cairo Delhi Dublin Geneva Lagos Lima Lisbon London Madrid Milan Oslo Paris Prague Rome Seoul Tokyo
Vienna
"""
NAMES = tuple(_NAMES.split())
CITIES = tuple(_CITIES.split())
COLORS = ("black", "blue", "brown", "green", "grey", "pink", "purple", "red", "white", "yellow")
SHOUTED = WORDS[::6]
"""The words whose upper-case form the tokenizer also keeps whole."""

FILLER = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
    "The river runs to the sea.",
    "A bird sings in the tree.",
    "The train is late today.",
    "Rain falls on the roof.",
    "We walk home in the evening.",
    "The market opens in the morning.",
    "Nothing much happens here.",
)
