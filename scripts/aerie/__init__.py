"""Aerie: a target language model in, a served and measured EAGLE-3 drafter out.

Reading order; each module may import only those above it:

    artifact       one way to write a file, one way to trust one (standard library only)
    progress       long work as lines with the time left
    container      what Apptainer needs on this machine
    image          the SGLang image: base, wheelhouse, build, content digest
    config         config.yaml against its closed schema, all defects at once
    server         start, ask and stop one SGLang process
    target         the target's files, their digests, and its head without loading the model
    prompts        the ordered prompt list, its chunks, the held-out rows
    conversations  the target's answers, turn by turn, with the ids it used
    tokens         conversations as token ids and a loss mask
    hidden         the captured states of one chunk: byte format, writer, reader
    convert        the same in the formats of other trainers
    vocab          the draft vocabulary
    drafter        the EAGLE-3 module
    training       its batches, teacher and loss
    acceptance     its offline accept length
    checkpoint     its resumable state
    export         the trained drafter as a folder SGLang serves
    arms           measurements of one served configuration
    figures        plots as inline SVG
    report         everything above as one page
"""
