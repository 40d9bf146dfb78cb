"""Results that stand: experiments as short definitions, what their runs found as small files, and pages made of them.

::

    definition    what an experiment is: methods, cells, seeds, what is reported, the papers' figures and claims
    plan          the recipe, the command and the fingerprint of each of its runs
    store         results/NAME.json, which processes write one after another, and what a record is
    tuning        settings that are chosen on validation data, by the same number of trials for each method
    perform       runs what is missing
    judge         do the claims hold? Paired differences over seeds
    tables        the tables of pages, from stored records
    pages         pages whose tables, figures and numbers come from stored records
    check         do files, definitions and pages agree?
"""
