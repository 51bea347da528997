"""Words and facts of the demo corpus. Data only; `corpus.py` makes sentences from them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hero:
    """The main character of a story, with the choices that make its usual story.

    `he` is the pronoun in the nominative. `home` completes "lived in"; `food` completes "loved to eat".
    """

    kind: str
    name: str
    he: str
    trait: str
    color: str
    home: str
    food: str
    friend: str


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _pairs(text: str) -> dict[str, str]:
    """Keys and values from "key:value" words, in which "_" means a space."""
    rows = (word.replace("_", " ").partition(":") for word in text.split())
    return {key: value for key, _, value in rows}


def _heroes(rows: str) -> tuple[Hero, ...]:
    return tuple(Hero(*(cell.strip() for cell in row.split("|"))) for row in rows.strip().splitlines())


HEROES = _heroes("""
fox | Rusty | he | clever | red | a quiet forest | wild berries | owl
owl | Olive | she | wise | brown | an old oak tree | sweet nuts | mouse
rabbit | Clover | she | quick | white | a green meadow | fresh carrots | turtle
bear | Bruno | he | gentle | brown | a warm cave | golden honey | bee
mouse | Pip | he | tiny | gray | a little hole under the barn | yellow cheese | cat
cat | Luna | she | curious | black | a small house by the river | fresh fish | dog
dog | Max | he | loyal | brown | a small yellow house | meat pies | cat
lion | Leo | he | brave | yellow | the wide grassland | roasted corn | mouse
tiger | Tara | she | strong | orange | a deep jungle | ripe mangoes | monkey
elephant | Ella | she | kind | gray | a hot valley | green leaves | bird
monkey | Milo | he | playful | brown | a tall palm tree | yellow bananas | parrot
turtle | Theo | he | patient | green | a calm pond | water plants | rabbit
frog | Freddy | he | cheerful | green | a muddy pond | juicy plums | duck
duck | Daisy | she | friendly | yellow | a quiet lake | bread crumbs | frog
horse | Star | she | fast | white | a big stable | sweet hay | dog
cow | Bella | she | calm | white | a green field | fresh grass | hen
pig | Percy | he | happy | pink | a muddy yard | red apples | sheep
sheep | Woolly | she | shy | white | a grassy valley | soft clover | goat
goat | Gus | he | stubborn | gray | a rocky valley | fresh herbs | sheep
hen | Henny | she | busy | red | a cozy barn | golden corn | duck
wolf | Walter | he | lonely | gray | a snowy forest | warm soup | deer
deer | Dora | she | graceful | brown | a misty forest | soft moss | rabbit
squirrel | Sam | he | busy | red | a hollow tree | crunchy acorns | bird
hedgehog | Hazel | she | careful | brown | a pile of dry leaves | sweet pears | fox
penguin | Penny | she | funny | black | a land of ice | silver fish | seal
seal | Sandy | he | playful | gray | a cold bay | salty fish | penguin
whale | Willow | she | huge | blue | the deep sea | small shrimp | dolphin
dolphin | Finn | he | clever | blue | a bright blue bay | tasty fish | whale
parrot | Polly | she | noisy | green | a rainy jungle | sunflower seeds | monkey
bee | Buzz | he | busy | yellow | a round hive | sweet honey | butterfly
butterfly | Bonnie | she | beautiful | purple | a garden of roses | flower nectar | bee
ant | Andy | he | hardworking | black | a hill of sand | sugar crumbs | bee
snail | Sally | she | slow | brown | a vegetable garden | green lettuce | frog
kangaroo | Kira | she | quick | brown | a dry valley | tall grass | koala
koala | Kofi | he | sleepy | gray | a tall gum tree | fresh leaves | kangaroo
giraffe | Gina | she | tall | yellow | the sunny plains | tree leaves | elephant
zebra | Zack | he | proud | white | the open plains | dry grass | giraffe
panda | Ping | she | quiet | black | a bamboo forest | young bamboo | tiger
camel | Cass | he | patient | brown | a sandy desert | dry dates | goat
dragon | Drake | he | shy | green | a cave above the clouds | hot peppers | girl
robot | Robo | he | helpful | silver | a busy workshop | lemon cake | boy
bird | Bibi | she | cheerful | blue | a nest in the willow | ripe cherries | squirrel
boy | Tom | he | curious | blue | a village by the sea | apple pie | dog
girl | Mia | she | brave | purple | a town in the hills | pancakes | horse
king | Arthur | he | fair | golden | a stone castle | roast potatoes | wizard
queen | Clara | she | wise | golden | a white palace | almond cake | girl
wizard | Merlo | he | old | purple | a crooked tower | mushroom soup | owl
pirate | Jack | he | bold | black | a harbor by the wide sea | coconut bread | parrot
""")

#: Settings of a story other than the hero's home; each completes "lived in".
PLACES = (
    "a quiet forest",
    "a green meadow",
    "a snowy forest",
    "a sandy desert",
    "a deep jungle",
    "a stone castle",
    "a small village",
    "a rocky valley",
    "a busy town",
    "a village by the sea",
    "a green field",
    "a cold bay",
)

TRAITS = _words("""
    clever wise quick gentle tiny curious loyal brave strong kind playful patient cheerful friendly calm happy
    shy lonely funny sleepy proud quiet bold young
""")

NAMES = _words("""
    Anna Ben Carla David Emma Frank Grace Henry Iris James Kate Liam Maria Noah Oscar Paula Quinn Rosa Simon
    Tina Victor Wendy Yuki Zoe Alex Sara Peter Lucy Paul Julia Mark Nina Omar Ravi Lena Tom Mia Max Jack Clara
""")


@dataclass(frozen=True, slots=True)
class Trouble:
    """A problem, an attempt, its solution and the lesson. `{...}` fields as in `corpus.story`."""

    problem: str
    attempt: str
    solution: str
    lesson: str


TROUBLES = (
    Trouble(
        "a big storm blew down {his} home",
        "{He} tried to build it again, but the wood was too heavy",
        "they carried the wood piece by piece and built a new home before dark",
        "hard work is easier with a friend",
    ),
    Trouble(
        "{he} lost {his} way in the fog",
        "{He} walked in circles, but every path looked the same",
        "they followed the sound of the river and found the way home",
        "it is wise to ask for help",
    ),
    Trouble(
        "the river dried up and there was no water to drink",
        "{He} dug a deep hole, but it was full of sand",
        "they moved a big stone and the water began to flow again",
        "small friends can do great things",
    ),
    Trouble(
        "{he} found a golden key in the grass",
        "{He} tried every door, but the key did not fit",
        "they found a little box under a tree, and it was full of shining stars",
        "good things are better when they are shared",
    ),
    Trouble(
        "{he} fell into a deep hole",
        "{He} jumped and jumped, but the walls were too high",
        "they made a long rope out of grass, and {name} climbed out",
        "a true friend never walks away",
    ),
    Trouble(
        "winter came and there was nothing left to eat",
        "{He} looked under the snow, but the ground was frozen",
        "they cooked a big pot of soup and shared it with everyone",
        "sharing makes every meal taste better",
    ),
    Trouble(
        "{he} heard a strange noise behind the door",
        "{He} hid under a blanket, but the noise did not stop",
        "they took a lamp outside and saw that it was only the wind",
        "many fears are smaller than they look",
    ),
    Trouble(
        "{he} wanted to see the top of the mountain",
        "{He} ran up the hill, but soon {he} was too tired to go on",
        "they walked slowly, step by step, and watched the sun rise from the top",
        "patience takes you further than speed",
    ),
    Trouble(
        "{he} broke the red kite of a friend",
        "{He} wanted to hide it, but {he} could not sleep that night",
        "they mended the kite with paper and string, and it flew higher than before",
        "telling the truth makes the heart light",
    ),
    Trouble(
        "a little bird fell out of its nest",
        "{He} tried to reach the nest, but the branch was too high",
        "they stood on each other's shoulders and put the bird back in its nest",
        "kindness is never too small",
    ),
)

#: Templates of stories. `corpus.story` fills the fields; `{a_x}` is `x` with its article.
STORY_SHAPES = (
    "Once upon a time, there was {a_trait} {kind} named {name}. {He} lived in {home} and loved to eat {food}. "
    'One day, {problem}. {attempt}. Then {a_friend} named {fname} came by. "Let me help you," said {fname}. '
    "Together, {solution}. {name} learned that {lesson}. From that day on, {name} and {fname} were best friends.",
    "In {home}, there lived {a_trait} {kind} named {name}. Every morning, {he} ate {food} and sang a happy song. "
    'One morning, {problem}. {attempt}. {fname} the {friend} saw it and said, "Do not worry, {name}." '
    "Side by side, {solution}. That night, {name} smiled at the moon, because {he} knew that {lesson}.",
    "Long ago, {a_trait} {kind} named {name} lived in {home}. {His} best friend was {a_friend} named {fname}. "
    "One day, {problem}. {attempt}. So {he} asked {fname} for help. "
    'After a short rest, {solution}. They ate {food} and laughed until the stars came out. "{Lesson}," said {name}.',
    "There once was {a_kind} named {name}, and everyone said that {he} was very {trait}. {He} lived in {home}. "
    "One evening, {problem}. {attempt}. {name} sat down and cried. Soon {fname} the {friend} heard {him}. "
    '"We can do this together," said {fname}. And so {solution}. To say thank you, {name} gave {fname} some {food}. '
    "The end of the story is simple: {lesson}.",
)

CAPITALS = _pairs("""
    France:Paris Germany:Berlin Italy:Rome Spain:Madrid Portugal:Lisbon England:London Ireland:Dublin
    Scotland:Edinburgh Norway:Oslo Sweden:Stockholm Denmark:Copenhagen Finland:Helsinki Poland:Warsaw
    Austria:Vienna Switzerland:Bern Belgium:Brussels Greece:Athens Turkey:Ankara Russia:Moscow Ukraine:Kyiv
    Hungary:Budapest Romania:Bucharest Bulgaria:Sofia Croatia:Zagreb Serbia:Belgrade Iceland:Reykjavik
    Estonia:Tallinn Latvia:Riga Lithuania:Vilnius Japan:Tokyo China:Beijing India:New_Delhi Thailand:Bangkok
    Vietnam:Hanoi Indonesia:Jakarta Nepal:Kathmandu Iran:Tehran Iraq:Baghdad Egypt:Cairo Kenya:Nairobi
    Ghana:Accra Morocco:Rabat Ethiopia:Addis_Ababa Senegal:Dakar Canada:Ottawa Cuba:Havana Peru:Lima
    Chile:Santiago Brazil:Brasilia Colombia:Bogota Ecuador:Quito Australia:Canberra
""")

#: Cities that are not capitals, for questions about weather and the like.
MORE_CITIES = tuple(
    each.replace("_", " ")
    for each in _words("""
    Barcelona Munich Hamburg Milan Naples Venice Lyon Marseille Zurich Geneva Seville Porto Antwerp Rotterdam Amsterdam
    Manchester Liverpool Glasgow Boston Chicago Seattle Denver Dallas Houston Miami Atlanta Toronto Montreal Vancouver
    Sydney Melbourne Mumbai Shanghai Osaka Kyoto Seoul Singapore Dubai Istanbul Lagos Washington New_York San_Francisco
    Los_Angeles Rio_de_Janeiro Cape_Town Hong_Kong
    """)
)

COLORS = _pairs("""
    the_sky:blue grass:green snow:white coal:black a_banana:yellow a_lemon:yellow a_tomato:red a_strawberry:red
    a_carrot:orange the_sun:yellow the_sea:blue blood:red chocolate:brown milk:white an_elephant:gray
    a_flamingo:pink a_plum:purple gold:yellow a_frog:green a_fox:red a_polar_bear:white a_cherry:red wood:brown
    salt:white a_pumpkin:orange the_night:black an_orange:orange a_leaf:green
""")

OPPOSITES = _pairs("""
    hot:cold big:small up:down left:right day:night black:white old:young fast:slow high:low good:bad happy:sad
    wet:dry hard:soft open:closed early:late full:empty light:dark long:short loud:quiet near:far new:old
    rich:poor right:wrong strong:weak sweet:sour thick:thin wide:narrow clean:dirty deep:shallow easy:difficult
    true:false alive:dead in:out yes:no always:never first:last push:pull win:lose begin:end buy:sell give:take
    love:hate tall:short cold:hot small:big slow:fast night:day sad:happy
""")

DEFINITIONS = {
    "a fox": "A fox is a small wild animal with red fur and a long tail.",
    "an owl": "An owl is a bird that hunts at night and sees very well.",
    "a river": "A river is a long stream of water that flows to the sea.",
    "a mountain": "A mountain is a very high hill made of rock.",
    "a book": "A book is a set of pages with words to read.",
    "a computer": "A computer is a machine that stores and changes information.",
    "a robot": "A robot is a machine that can do work by itself.",
    "a planet": "A planet is a large round body that moves around a star.",
    "the sun": "The sun is the star at the center of our solar system.",
    "the moon": "The moon is a round body of rock that moves around the Earth.",
    "rain": "Rain is water that falls from the clouds in small drops.",
    "snow": "Snow is frozen water that falls from the clouds in white flakes.",
    "a tree": "A tree is a tall plant with a trunk, branches and leaves.",
    "a bridge": "A bridge is a road that leads over water or a valley.",
    "a doctor": "A doctor is a person who helps people when they are ill.",
    "a teacher": "A teacher is a person who helps others to learn.",
    "a friend": "A friend is a person whom you like and trust.",
    "music": "Music is sound that is made to please the ear.",
    "a language model": "A language model is a program that predicts the next word of a text.",
    "a token": "A token is a small piece of text, such as a word or a part of a word.",
    "a GPU": "A GPU is a chip that does many calculations at the same time.",
    "a prompt": "A prompt is the text that you give to a language model.",
    "a cache": "A cache is a store that keeps results, so that they need not be computed again.",
    "a KV cache": "A KV cache keeps the keys and values of earlier tokens, "
    "so that a model need not compute them again.",
    "prefix caching": "Prefix caching means that prompts with the same beginning share the work that was done for it.",
    "a router": "A router is a program that decides which replica should answer a request.",
    "a replica": "A replica is one running copy of a model.",
    "a cluster": "A cluster is a group of computers that work together.",
    "Python": "Python is a programming language that is easy to read.",
    "Ray": "Ray is a framework that runs Python programs on many computers.",
    "machine learning": "Machine learning means that a program learns from examples.",
    "water": "Water is a clear liquid that all living things need.",
    "ice": "Ice is frozen water.",
    "a volcano": "A volcano is a mountain that can throw out hot rock and ash.",
    "an island": "An island is a piece of land with water all around it.",
    "a desert": "A desert is a dry place where very little rain falls.",
    "a forest": "A forest is a large place with many trees.",
    "gravity": "Gravity is the force that pulls things towards the ground.",
    "a rainbow": "A rainbow is an arc of colors that we see when the sun shines through rain.",
    "time": "Time is what we measure with clocks.",
}

SOUNDS = _pairs("""
    dog:woof cat:meow cow:moo duck:quack pig:oink sheep:baa bee:buzz lion:roar owl:hoot frog:croak mouse:squeak
    horse:neigh hen:cluck wolf:howl bird:tweet
""")

YOUNG = _pairs("""
    dog:puppy cat:kitten cow:calf duck:duckling pig:piglet sheep:lamb horse:foal hen:chick bear:cub lion:cub
    fox:cub goat:kid deer:fawn frog:tadpole kangaroo:joey wolf:pup seal:pup elephant:calf whale:calf owl:owlet
""")

HELLO = _pairs("""
    French:bonjour Spanish:hola German:hallo Italian:ciao Portuguese:ola Dutch:hallo Swedish:hej Polish:czesc
    Japanese:konnichiwa Chinese:ni_hao Turkish:merhaba Hindi:namaste
""")

LANGUAGES = tuple(HELLO)

UNITS = _words("""
    miles kilometers meters feet inches pounds kilograms grams liters gallons euros dollars celsius fahrenheit hours
    minutes seconds days
""")

JOBS = _words("doctor teacher baker pilot farmer painter nurse driver singer writer")

DAYS = _words("""
    Monday Tuesday Wednesday Thursday Friday Saturday Sunday
""")
MONTHS = _words("""
    January February March April May June July August September October November December
""")
NUMBERS = _words("""
    zero one two three four five six seven eight nine ten eleven twelve
""")

#: Questions in several wordings, and their answer.
FIXED: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Who are you?", "What is your name?", "Introduce yourself.", "Tell me about yourself."),
        "I am the small demo model of homing. I can tell short stories and answer simple questions.",
    ),
    (
        ("What can you do?", "How can you help me?", "Help.", "What do you know?"),
        "I can tell stories about animals, answer simple questions, do small sums, write short JSON and call tools.",
    ),
    (
        ("What is homing?", "Tell me about homing.", "Explain homing.", "What does homing do?"),
        "Homing is a serving cluster for language models. Its router sends each request to the replica that already "
        "has the beginning of the prompt in its cache.",
    ),
    (
        ("Who made you?", "Who trained you?", "Where do you come from?"),
        "I was trained by a script of the homing project on simple text that the script wrote itself.",
    ),
    (
        ("How big are you?", "How many parameters do you have?"),
        "I have about four million parameters, so I am very small.",
    ),
    (("Are you a human?", "Are you a robot?", "Are you real?"), "No, I am a small language model."),
    (
        ("Why is it called homing?", "Why the name homing?"),
        "It is named after homing pigeons, because each request finds its way home to the right replica.",
    ),
    (
        ("How does homing route requests?", "How does the router work?", "How does homing choose a replica?"),
        "The router looks for the replica with the longest cached prefix and a short queue, "
        "and sends the request there.",
    ),
    (
        ("What is a block?", "What is a cache block?"),
        "A block is a fixed number of tokens whose keys and values are stored together.",
    ),
    (("What is prefill?", "Explain prefill."), "Prefill is the step in which the model reads the whole prompt."),
    (
        ("What is decoding?", "What is decode?"),
        "Decoding is the step in which the model writes its answer one token at a time.",
    ),
    (
        (
            "Hello",
            "Hello!",
            "Hi",
            "Hi!",
            "Hi there!",
            "Hey",
            "Good morning!",
            "Good evening!",
            "Hello there.",
            "Say hello.",
        ),
        "Hello! How can I help you today?",
    ),
    (("How are you?", "How are you today?", "How is it going?"), "I am fine, thank you. How can I help you?"),
    (("Thank you.", "Thanks!", "Thank you very much!", "Thanks a lot."), "You are welcome!"),
    (("Goodbye.", "Bye!", "See you later.", "Good night."), "Goodbye! Have a nice day."),
    (
        ("Tell me a joke.", "Make me laugh.", "Do you know a joke?"),
        "Why did the owl sit on the computer? Because it wanted to watch the mouse.",
    ),
    (("Tell me another joke.", "Another joke, please."), "What do you call a sleeping bull? A bulldozer."),
    (
        ("Why is the sky blue?", "Explain why the sky is blue."),
        "The sky is blue because the air scatters blue light more than red light.",
    ),
    (("Why do birds sing?",), "Birds sing to find a friend and to guard their home."),
    (
        ("Why do leaves fall?", "Why do trees lose their leaves?"),
        "Leaves fall because trees save water in the cold winter.",
    ),
    (("How many days are in a week?",), "There are seven days in a week."),
    (("How many months are in a year?",), "There are twelve months in a year."),
    (("How many hours are in a day?",), "There are twenty-four hours in a day."),
    (("How many legs does a spider have?",), "A spider has eight legs."),
    (("How many legs does a dog have?",), "A dog has four legs."),
    (
        ("List the days of the week.", "Name the days of the week.", "What are the days of the week?"),
        "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.",
    ),
    (
        ("List the months.", "Name the months of the year.", "What are the months of the year?"),
        "January, February, March, April, May, June, July, August, September, October, November and December.",
    ),
    (("List the seasons.", "Name the four seasons."), "Spring, summer, autumn and winter."),
    (("Name three animals.", "List three animals."), "Fox, owl and rabbit."),
    (("Name three fruits.", "List three fruits."), "Apple, banana and cherry."),
    (("Name three colors.", "List three colors."), "Red, green and blue."),
    (("What is the largest planet?", "Which planet is the largest?"), "The largest planet is Jupiter."),
    (("What is the largest ocean?",), "The largest ocean is the Pacific Ocean."),
    (("What is the largest animal?",), "The largest animal is the blue whale."),
    (("What is the highest mountain?", "What is the tallest mountain?"), "The highest mountain is Mount Everest."),
    (("Which animal is the fastest?", "What is the fastest animal?"), "The fastest animal on land is the cheetah."),
    (("Who wrote Hamlet?", "Who wrote Romeo and Juliet?"), "It was written by William Shakespeare."),
    (("Who painted the Mona Lisa?",), "The Mona Lisa was painted by Leonardo da Vinci."),
    (("What do bees make?",), "Bees make honey."),
    (("What do cows eat?",), "Cows eat grass."),
    (("What do you need to bake bread?",), "To bake bread, you need flour, water, salt and yeast."),
    (("Give me some advice.", "What should I do today?"), "Take a walk, drink some water and be kind to somebody."),
    (
        ("Say something.", "Tell me something.", "Tell me something interesting.", "Tell me a fun fact."),
        "An octopus has three hearts and blue blood.",
    ),
)

#: Common words for questions that the model cannot answer, and for filler that it should ignore.
COMMON_WORDS = _words("""
    people history water school company market number system program question government house party country
    point world area family story month business book job word issue side head service friend father power game
    line member law car city name president team minute idea body information face office door health person art
    war result change morning reason research girl guy moment air teacher force education foot boy age policy
    music process data server network model engine design budget report meeting project price customer product
    error function file folder machine cloud memory table window garden kitchen street bridge island weather
    summer winter letter paper picture movie song phone camera ticket train plane hotel doctor hospital medicine
    science physics chemistry biology football tennis recipe chicken pasta salad coffee budget tax bank money
    loan stock energy oil electric solar battery engine wheel metal plastic glass cotton fashion language
    grammar poem novel author election army border treaty empire century ancient modern future theory quantum
    atom cell brain heart blood
""")
VERBS = _words("""
    write make find explain build fix choose measure compare describe improve check open close start stop change
    translate summarize review create calculate plan test
""")
ADJECTIVES = _words("""
    important different large local social early possible clear simple general common strong open public recent
    special difficult real best free certain new small great high old good bad
""")
