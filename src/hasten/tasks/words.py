"""Word lists the families draw from."""

from __future__ import annotations

WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    """``"a:b c:d"`` as pairs; ``_`` stands for a blank."""
    made = (pair.replace("_", " ").split(":") for pair in text.split())
    return tuple((first, second) for first, second in made)


KINDS = {
    "animal": _words(
        "horse tiger rabbit monkey sheep camel goat wolf bear zebra donkey lion cow pig deer fox"
    ),
    "fruit": _words(
        "apple banana cherry grape lemon mango melon orange peach pear plum apricot lime fig"
    ),
    "colour": _words("red blue green yellow purple brown black white pink grey violet turquoise"),
    "tool": _words("hammer saw drill screwdriver axe shovel wrench pliers chisel rake spade"),
    "garment": _words("shirt coat hat scarf glove sock jacket skirt dress trousers sweater belt"),
    "vehicle": _words("car bus train bicycle truck boat tram ship van taxi tractor helicopter"),
    "instrument": _words("piano violin guitar drum flute trumpet harp cello clarinet organ banjo"),
    "drink": _words("water milk tea coffee juice wine beer lemonade cocoa cider"),
}
"""Words by kind; each is of one kind only."""

NOUNS = _words("cat dog boy girl king bird nurse farmer teacher pilot child baker friend doctor")
ADJECTIVES = _words("old small big happy tired young kind brave quiet tall clever hungry")
VERBS = _words("saw found bought lost took kept wanted liked sold brought")
OBJECTS = _words("ball book lamp cup chair box key letter bag clock coin map ring stone")

SHORT_WORDS = _words(
    "apple banana letter cotton coffee bottle window garden summer winter rabbit pepper kitten "
    "button dinner mirror carrot planet school street bridge castle flower yellow orange silver "
    "tomato potato guitar lemon melon paper river table chair house mouse horse tiger zebra "
    "eagle queen tree book moon door wood food road lake bird fish milk salt nose hand foot "
    "green black white brown sleep sheep wheel cheese puzzle soccer tennis hammer ladder egg "
    "all bell ball hill grass glass dress cross happy funny sunny rainy cloudy noodle pillow"
)

ANTONYMS = _pairs(
    "hot:cold big:small tall:short fast:slow happy:sad light:dark up:down left:right good:bad "
    "new:old rich:poor open:closed early:late hard:soft full:empty wet:dry loud:quiet clean:dirty "
    "strong:weak high:low thick:thin wide:narrow near:far first:last day:night black:white "
    "heavy:light true:false win:lose buy:sell love:hate start:stop push:pull in:out on:off "
    "yes:no alive:dead sharp:dull deep:shallow sweet:sour rough:smooth brave:cowardly "
    "cheap:expensive safe:dangerous easy:difficult young:old asleep:awake above:below "
    "inside:outside before:after always:never more:less best:worst friend:enemy war:peace "
    "north:south east:west summer:winter morning:evening top:bottom front:back "
    "give:take come:go laugh:cry arrive:leave remember:forget begin:end lost:found "
    "public:private guilty:innocent major:minor maximum:minimum positive:negative "
    "victory:defeat success:failure profit:loss question:answer male:female "
    "increase:decrease accept:refuse attack:defend borrow:lend export:import"
)

PLURALS = _pairs(
    "child:children man:men woman:women foot:feet tooth:teeth goose:geese mouse:mice ox:oxen "
    "person:people leaf:leaves knife:knives wife:wives life:lives wolf:wolves half:halves "
    "shelf:shelves loaf:loaves thief:thieves calf:calves elf:elves scarf:scarves hoof:hooves "
    "sheep:sheep deer:deer fish:fish baby:babies city:cities lady:ladies party:parties "
    "story:stories country:countries family:families berry:berries cherry:cherries puppy:puppies "
    "box:boxes fox:foxes bus:buses dish:dishes church:churches watch:watches brush:brushes "
    "potato:potatoes tomato:tomatoes hero:heroes echo:echoes piano:pianos photo:photos "
    "cactus:cacti fungus:fungi nucleus:nuclei crisis:crises thesis:theses analysis:analyses "
    "oasis:oases basis:bases phenomenon:phenomena criterion:criteria datum:data louse:lice "
    "die:dice index:indices matrix:matrices vertex:vertices cat:cats dog:dogs book:books "
    "table:tables day:days key:keys boy:boys toy:toys roof:roofs chief:chiefs"
)

PAST = _pairs(
    "go:went see:saw eat:ate drink:drank run:ran swim:swam sing:sang ring:rang begin:began "
    "write:wrote drive:drove ride:rode rise:rose break:broke speak:spoke choose:chose freeze:froze "
    "steal:stole wake:woke give:gave take:took shake:shook know:knew grow:grew throw:threw "
    "blow:blew fly:flew draw:drew come:came become:became find:found bind:bound fight:fought "
    "buy:bought bring:brought think:thought catch:caught teach:taught seek:sought sell:sold "
    "tell:told keep:kept sleep:slept weep:wept sweep:swept feel:felt kneel:knelt leave:left "
    "lose:lost build:built send:sent spend:spent lend:lent bend:bent make:made have:had say:said "
    "pay:paid stand:stood understand:understood hold:held win:won dig:dug stick:stuck sit:sat "
    "get:got forget:forgot fall:fell feed:fed lead:led meet:met hide:hid bite:bit shine:shone "
    "shoot:shot wear:wore tear:tore swear:swore hear:heard do:did cut:cut put:put hit:hit "
    "hang:hung sink:sank shrink:shrank spring:sprang lie:lay light:lit"
)

CAPITALS = _pairs(
    "France:Paris Germany:Berlin Italy:Rome Spain:Madrid Portugal:Lisbon Austria:Vienna "
    "Greece:Athens Poland:Warsaw Hungary:Budapest Ireland:Dublin Norway:Oslo Sweden:Stockholm "
    "Finland:Helsinki Denmark:Copenhagen Iceland:Reykjavik Belgium:Brussels Russia:Moscow "
    "Bulgaria:Sofia Romania:Bucharest Croatia:Zagreb Serbia:Belgrade Slovenia:Ljubljana "
    "Latvia:Riga Estonia:Tallinn Lithuania:Vilnius Turkey:Ankara Egypt:Cairo Kenya:Nairobi "
    "Morocco:Rabat Tunisia:Tunis Ethiopia:Addis_Ababa Ghana:Accra Nigeria:Abuja Senegal:Dakar "
    "Zambia:Lusaka Uganda:Kampala Rwanda:Kigali Angola:Luanda Japan:Tokyo China:Beijing "
    "India:New_Delhi Pakistan:Islamabad Nepal:Kathmandu Thailand:Bangkok Vietnam:Hanoi "
    "Indonesia:Jakarta Philippines:Manila Mongolia:Ulaanbaatar Iran:Tehran Iraq:Baghdad "
    "Syria:Damascus Lebanon:Beirut Jordan:Amman Qatar:Doha Oman:Muscat Canada:Ottawa Cuba:Havana "
    "Jamaica:Kingston Peru:Lima Chile:Santiago Argentina:Buenos_Aires Brazil:Brasilia "
    "Colombia:Bogota Venezuela:Caracas Ecuador:Quito Uruguay:Montevideo Paraguay:Asuncion "
    "Australia:Canberra Ukraine:Kyiv Slovakia:Bratislava Albania:Tirana Cyprus:Nicosia"
)
