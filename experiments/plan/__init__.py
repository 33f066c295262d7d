"""What accuracy would my sites have, and what does each risk? A table, a picture and command lines for your own file.

    jaxfl plan patients.csv --label-column ill --site-column hospital
    jaxfl plan patients.csv --label-column ill --site-column hospital --graph roads.csv --epsilon 1 3 8
    jaxfl plan patients.csv --label-column ill --site-column hospital --epsilon 3 --private-selection geometric

Each budget is run by experiments.privsgp_vr with a ladder of step sizes, and beside it four rows to compare with: all
samples in one place at the same epsilon, and, without noise, all samples in one place, all sites together, and each
site by itself. Of each row the table shows the best step. All options of experiments.privsgp_vr are options here, and
the run lies in runs/plan/NAME, where --resume finds it.
"""
